"""FSDP with a Step's mixed precision: bytes gathered, bytes alive, the dtypes of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks
from shoal._torch.dispatch import TorchDispatchMode

pytestmark = pytest.mark.processes

WIDTH, DEPTH, CLASSES, SAMPLES = 32, 4, 4, 16
WEIGHTS = {(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)}
"""Shapes of the weights of blocks, as stored and as multiplied."""


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="shard=2") as ranks:
        yield ranks


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Net(nn.Module):
    """Modules of either dtype under autocast, a buffer in float32, a unit with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.register_buffer("places", torch.randn(WIDTH))
        self.first = nn.LayerNorm(WIDTH)
        norms = (nn.LayerNorm(WIDTH), nn.GroupNorm(4, WIDTH), nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH))
        self.blocks = nn.ModuleList(map(Block, norms))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embedding(x) + self.places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Exact(Net):
    """The same without BatchNorm, which computes with the samples of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1] = Block(nn.LayerNorm(WIDTH))


class Plain(nn.Module):
    """Blocks without norms, whose parameters are nearly all of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Identity()) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Gathered(TorchDispatchMode):
    """Bytes of all-gathers and reduce-scatters, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = str(function)
        if "_allgather_base_" in name:
            self.bytes[f"gathered {arguments[0].dtype}"] += arguments[0].nbytes
        elif "_reduce_scatter_base_" in name:
            self.bytes[f"reduced {arguments[1].dtype}"] += arguments[1].nbytes
        return function(*arguments, **(keywords or {}))


def step_of(world: shoal.World, net: type[nn.Module], strategy: Any, **options: Any) -> shoal.Step:
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(net(), world, strategy)
    task = options.pop("task", shoal.Task(loss))
    return shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.05), task, **options)


def batches(world: shoal.World, net: type[nn.Module], **options: Any) -> Iterator[shoal.Batch]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    tokens = torch.randint(0, 10, (SAMPLES,), generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = (inputs if net is Plain else tokens, labels)
    yield from shoal.Loader(data, world, batch_size=8, **options).epochs(1)


def measured(world: shoal.World, param_dtype: str | None) -> dict[str, int]:
    """The bytes that one step moves, and those of 16-bit weights of blocks that live after forward."""
    saved: list[Tensor] = []
    alive = 0

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) in WEIGHTS and tensor.dtype == torch.bfloat16:
            saved.append(tensor)
        return tensor

    def count(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal alive
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        alive = sum(storages.values())
        saved.clear()
        return loss(output, batch)

    strategy = shoal.FSDP(param_dtype=param_dtype)
    step = step_of(world, Plain, strategy, precision="bf16", task=shoal.Task(count))
    first, second = batches(world, Plain)
    step(first)
    saved.clear()
    with Gathered() as found, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(second)
    return {**found.bytes, "alive": alive}


def test_parameters_are_gathered_in_16_bits_and_not_copied(two: Ranks) -> None:
    blocks = DEPTH * sum(p.numel() for p in Block(nn.Identity()).parameters())
    head = sum(p.numel() for p in nn.Linear(WIDTH, CLASSES).parameters())
    kept = (2 * DEPTH - 1) * 4 * WIDTH * WIDTH  # all but the first weight, whose inputs learn nothing
    wide, half = "gathered torch.float32", "gathered torch.bfloat16"
    reduced = {"reduced torch.float32": 4 * (blocks + head)}
    times = 2 * blocks + head  # of the root once: its parameters stay gathered until backward
    for before in two.call(measured, "fp32"):
        assert before == {wide: 4 * times, **reduced, "alive": 2 * kept}
    for after in two.call(measured, None):
        assert after == {half: 2 * times, **reduced, "alive": 0}


def dtypes(world: shoal.World, strategy: Any, precision: str) -> dict[str, str]:
    """The dtypes of the outputs of modules, and of the gradients that the optimizer gets."""
    step = step_of(world, Net, strategy, precision=precision)
    found: dict[str, str] = {}

    def note(name: str) -> Any:
        return lambda _, inputs, output: found.update({name: f"{inputs[0].dtype} {output.dtype}"})

    for name, module in step.model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(note(name))
    optimizer = step.optimizer
    optimizer.register_step_pre_hook(
        lambda *_: found.update(
            {n: str(p.grad.dtype) for n, p in step.model.named_parameters() if p.grad is not None}
        )
    )
    for batch in batches(world, Net):
        step(batch)
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_compute_in_the_dtypes_of_one_process(two: Ranks, precision: str) -> None:
    with shoal.init() as world:
        expected = dtypes(world, None, precision)
    assert expected["embedding"] == "torch.int64 torch.float32"
    assert expected["blocks.0.norm"] == "torch.float32 torch.float32"
    for found in two.call(dtypes, shoal.FSDP(), precision):
        assert found == expected


def trained(world: shoal.World, strategy: Any, precision: str, compile: str | None) -> list[Tensor]:
    """Losses of steps, of evaluations, and outputs of the model between steps."""
    step = step_of(world, Exact, strategy, precision=precision, compile=compile, clip=1.0)
    tokens = torch.arange(10)
    found: list[Tensor] = []
    for batch in batches(world, Exact, micro_batches=2):
        result = step(batch)
        step.model.eval()
        with torch.no_grad():
            outputs = step.model(tokens)
        assert outputs.dtype == torch.float32
        step.model.train()
        evaluated = shoal.evaluate(step, (tokens, tokens % CLASSES), batch_size=10)
        found += [torch.tensor(result.loss), outputs, torch.tensor(evaluated["loss"])]
    return found


WHOLE = shoal.FSDP(accumulate="whole", reshard_after_forward=False)


@pytest.mark.parametrize(
    ("strategy", "precision", "compile"),
    [
        (shoal.FSDP(), "bf16", None),
        (WHOLE, "fp16", None),
        pytest.param(shoal.FSDP(), "bf16", "inductor", marks=pytest.mark.full),
    ],
)
def test_between_steps_the_model_computes_in_its_own_dtype(
    two: Ranks, strategy: shoal.FSDP, precision: str, compile: str | None
) -> None:
    with shoal.init() as world:
        expected = trained(world, None, precision, None)
    for found in two.call(trained, strategy, precision, compile):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def computed_in(world: shoal.World, strategy: Any, precision: str) -> str:
    return str(step_of(world, Plain, strategy, precision=precision).dtype)


@pytest.mark.full
def test_a_step_knows_the_dtype_in_which_it_computes(two: Ranks) -> None:
    """For the peak of the device, and for hints about products in float32."""
    half = shoal.FSDP(param_dtype="bf16")
    assert set(two.call(computed_in, half, "fp32")) == {"torch.bfloat16"}
    assert set(two.call(computed_in, shoal.FSDP(), "fp32")) == {"torch.float32"}
    assert set(two.call(computed_in, shoal.FSDP(), "bf16")) == {"torch.bfloat16"}
