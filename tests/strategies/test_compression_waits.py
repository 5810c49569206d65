"""Compressed gradients: the host reads no value, backward does not wait, what "auto" is tried on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal._torch.dispatch import TorchDispatchMode
from shoal.strategies.data_parallel import choose_compression, compression
from shoal.strategies.data_parallel.compressed_collectives import CountedCollectives
from shoal.strategies.data_parallel.compression import Bucket, Compress
from shoal.util import accelerator

pytestmark = pytest.mark.processes

RANKS, WIDTH, BATCH = 2, 12, 12
METHODS: list[Compress] = [
    "bf16",
    "int8",
    shoal.PowerSGD(rank=2, warmup_steps=1),
    shoal.TopK(ratio=0.1),
]


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads, for each of which it would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        self.count += str(function).startswith(("aten._local_scalar_dense", "aten.is_nonzero"))
        return function(*arguments, **(keywords or {}))


def host_reads(world: shoal.World, how: Compress) -> int:
    chosen, wire, reads = compression.method(how), CountedCollectives(world), HostReads()
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        gradients: list[Tensor] = [torch.randn(size, generator=generator) for size in ((40, 30), (7,))]
        with reads:
            compression.reduce(chosen, Bucket(["a", "b"], gradients), wire)
    return reads.count


@pytest.mark.parametrize("how", METHODS, ids=str)
def test_the_host_reads_no_value(how: Compress, ranks: Ranks) -> None:
    assert ranks.call(host_reads, how) == [0] * RANKS


class OwnStream:
    """A device's module with streams, which notes what is done on which of them."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.current = "main"

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - as torch.cuda has it
        note = self.noted.append
        return SimpleNamespace(wait_stream=lambda other: note(f"side waits for {other}"))

    def current_stream(self, device: torch.device) -> str:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = "side"
        yield
        self.current = "main"


def streamed(world: shoal.World, how: Compress) -> list[str]:
    """What a step does on which stream, as if the device had streams."""
    module = OwnStream()
    inner = compression.reduce

    def reduced(*arguments: Any) -> None:
        module.noted.append(f"a bucket is reduced on {module.current}")
        inner(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "streams", lambda device: module)
        patch.setattr(compression, "reduce", reduced)
        world.reseed("weights", by_rank=False)
        model = shoal.parallelize(nn.Linear(WIDTH, 3), world, shoal.DDP(compression=how))
        module.noted.clear()  # of the zeros by which the buckets are ordered
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = shoal.Step(model, optimizer, shoal.Task(lambda y, b: (y.square().sum(), len(y))))
        inputs = torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH).float()
        for batch in shoal.Loader((inputs,), world, batch_size=BATCH).epochs(1):
            step(batch)
    return module.noted


def test_where_devices_have_streams_backward_does_not_wait(ranks: Ranks) -> None:
    for noted in ranks.call(streamed, "int8"):
        assert noted == ["side waits for main", "a bucket is reduced on side"]


class Sums(nn.Module):
    """The sum of the absolute values of its parameters, for each sample."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(each.clone() for each in parameters)

    def forward(self, inputs: Tensor) -> Tensor:
        sums: Tensor = torch.stack([each.abs().float().sum() for each in self.all]).sum()
        return sums * torch.ones(len(inputs))


def chosen_for(world: shoal.World, parameters: list[Tensor]) -> tuple[list[str], float]:
    """What is tried for "auto" with these parameters, and the loss of a step then."""
    tried: list[str] = []
    inner = choose_compression.choose

    def noted(gradients: Any, wire: CountedCollectives) -> Any:
        tried.extend(name for name, _ in gradients)
        return inner(gradients, wire)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_compression, "choose", noted)
        model = shoal.parallelize(Sums(parameters), world, shoal.DDP(compression="auto"))

    def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.sum(), len(output)

    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), shoal.Task(summed))
    loader = shoal.Loader((torch.ones(12, 2),), world, batch_size=6)
    return tried, [step(batch).loss for batch in loader.epochs(1)][-1]


@pytest.mark.parametrize(
    ("parameters", "tried"),
    [
        ([torch.ones(0, 3), torch.ones(5), torch.ones(7)], ["all.1", "all.2"]),
        ([torch.ones(12, dtype=torch.complex64)], []),
        ([torch.ones(2, dtype=torch.complex64), torch.ones(10)], ["all.1"]),
        ([torch.ones((), dtype=torch.float16), torch.ones(11)], ["all.1"]),
    ],
)
def test_what_most_gradients_are_is_tried(
    parameters: list[Tensor], tried: list[str], ranks: Ranks
) -> None:
    assert ranks.call(chosen_for, parameters) == [(tried, 12.0)] * RANKS
