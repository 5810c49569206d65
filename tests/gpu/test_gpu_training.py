"""Training on a GPU: one process, and two ranks, which share a GPU over Gloo or have one each.

The CPU runs the same elsewhere: the tables in `tests/strategies`, the rest in `tests/training`.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.accelerators import why_skipped
from helpers.feature_pairs import PAIRS, Pair, attempt, layout
from helpers.pairwise import cover
from helpers.ranks import Ranks
from helpers.reference import SEED, TOLERANCE, UNITS, Row, distance, specification, train
from helpers.strategy_table import CASES, STEPS, Case, check
from shoal.training.loss_scale import LossScale

LACKING = why_skipped("cuda")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(bool(LACKING), reason=LACKING),
]

SMALL = [case for case in CASES if case.size <= 2]
ONE = {case.way: case for case in reversed(SMALL)}.values()
FEW = cover(SMALL, lambda case: (case.way, case.precision))
ORDERED = sorted(SMALL, key=lambda case: (case not in ONE, case not in FEW, case.layout))
"""One case of each strategy comes first, because a machine may be there for minutes only."""
SAMPLES, WIDTH = 96, 16


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str], Ranks]]:
    with contextlib.ExitStack() as stack:
        running: dict[str, Ranks] = {}

        def ranks(division: str) -> Ranks:
            if division not in running:
                stack.close()
                running.clear()
                size = 1 if division.endswith("=1") else 2
                running[division] = stack.enter_context(Ranks(size, layout=division, seed=SEED))
            return running[division]

        yield ranks


def place(world: shoal.World) -> tuple[str, str]:
    backend = next(choice for choice in world.decisions if choice.what == "backend")
    return str(world.device), f"{backend.value}: {backend.reason}"


def test_two_ranks_share_it(started: Callable[[str], Ranks]) -> None:
    for device, backend in started("replicate=2").call(place):
        assert device.startswith("cuda")
        if torch.cuda.device_count() == 1:
            assert backend.startswith("gloo: ranks 0 and 1 share a GPU of ")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in {*ONE, *FEW} else pytest.mark.long) for case in ORDERED],
    ids=lambda case: "-".join(map(str, case)),
)
def test_every_strategy_trains_like_one_process(started: Callable[[str], Ranks], case: Case) -> None:
    check(started(case.layout), case)


TWO = [pair for pair in PAIRS if layout(pair).count("=") == 1]


@pytest.mark.long
@pytest.mark.parametrize("pair", TWO, ids=" x ".join)
def test_a_pair_trains_like_one_process(
    started: Callable[[str], Ranks], pair: Pair, tmp_path: Path
) -> None:
    """Features with each other and with each way; what is refused is so on the CPU too."""
    attempt(started(layout(pair)), pair, tmp_path / "run")


def problem(dropout: float = 0.0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4))
    return net, (torch.randn(SAMPLES, WIDTH), torch.randint(0, 4, (SAMPLES,)))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Parts:
    """A training of `problem`."""

    def __init__(self, world: shoal.World, dropout: float = 0.0, **options: Any) -> None:
        net, data = problem(dropout)
        self.model = shoal.parallelize(net, world)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = shoal.Step(self.model, optimizer, shoal.Task(loss), **options)
        self.data = shoal.Loader(data, world, batch_size=8)

    def run(self, directory: Path, **options: Any) -> shoal.Run:
        return shoal.Run(directory, self.step, self.data, trackers=(), **options)

    def parameters(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.model.parameters()]


def test_fp16_is_scaled_as_torch_does() -> None:
    """The first steps overflow, and are left out by both."""
    net, (inputs, labels) = problem()
    net = net.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    skipped = 0
    for epoch in range(3):
        order = torch.from_numpy(shoal.Permutation(SAMPLES, seed=SEED, epoch=epoch).indices(0, SAMPLES))
        for part in order.split(8):
            with torch.autocast("cuda", torch.float16):
                total = F.cross_entropy(net(inputs[part].cuda()), labels[part].cuda(), reduction="sum")
            scaler.scale(total / len(part)).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
    assert 0 < skipped < 30
    with shoal.init(seed=SEED) as world:
        parts = Parts(world, precision="fp16")
        parts.step._scale = LossScale(value=2.0**24)
        found = [parts.step(batch).skipped for batch in parts.data.epochs(3)]
        assert sum(found) == skipped
        for ours, theirs in zip(parts.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach().cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_it_trains_alike(precision: str) -> None:
    with shoal.init(seed=SEED) as world:
        found = []
        for compile in (None, "inductor"):
            parts = Parts(world, precision=precision, compile=compile)
            found.append([parts.step(batch).loss for batch in parts.data.epochs(2)])
        assert found[1] == pytest.approx(found[0], rel=1e-4 if precision == "fp32" else 2e-2)


class Distinct(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4096,), float(index)), index


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_copied_during_computation_and_are_correct(workers: int) -> None:
    """The GPU is kept busy, so that a copy which nobody waits for would be read too early or late."""
    with shoal.init(seed=SEED) as world:
        data = shoal.Loader(Distinct(), world, batch_size=16, num_workers=workers, pin_memory=True)
        heavy = torch.randn(4096, 4096, device=world.device)
        sums = []
        for batch in data.epochs(2):
            for micro in batch:
                heavy = torch.tanh(heavy @ heavy)
                assert micro[0].is_cuda
                sums.append((micro[0].sum(1), micro[1]))
        for total, index in sums:
            assert torch.equal(total, index.float() * 4096)
        indices = [int(i) for _, index in sums for i in index.tolist()]
        for epoch in range(2):
            order = shoal.Permutation(512, seed=SEED, epoch=epoch).indices(0, 512)
            assert indices[512 * epoch : 512 * (epoch + 1)] == order.tolist()


def test_a_resumed_run_is_bit_equal(tmp_path: Path) -> None:
    """Dropout draws on the GPU, whose random state is part of a checkpoint."""
    with shoal.init(seed=SEED) as world:
        whole = Parts(world, 0.3)
        with whole.run(tmp_path / "whole"):
            for batch in whole.data.epochs(2):
                whole.step(batch)
        first = Parts(world, 0.3)
        with first.run(tmp_path / "parts") as run:
            for batch in itertools.islice(first.data.epochs(2), 9):
                first.step(batch)
                run.tick()
            run.save()
        torch.cuda.manual_seed(99)
        second = Parts(world, 0.3)
        with second.run(tmp_path / "parts") as run:
            run.restore()
            for batch in second.data.epochs(2):
                second.step(batch)
        assert second.step.number == whole.step.number
        for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_what_is_saved_aside_is_the_state_of_its_step(tmp_path: Path) -> None:
    """Steps go on while it is written; the state was copied before."""
    with shoal.init(seed=SEED) as world:
        parts = Parts(world, 0.3)
        kept: dict[int, list[Tensor]] = {}
        with parts.run(tmp_path, keep=20) as run:
            for batch in parts.data.epochs(2):
                parts.step(batch)
                if parts.step.number % 6 == 0:
                    kept[parts.step.number] = parts.parameters()
                run.tick(every=6)
        for number in sorted(kept, reverse=True):
            again = Parts(world, 0.3)
            with again.run(tmp_path, keep=20) as run:
                assert run.restore() is not None
                assert again.step.number == number
            for ours, theirs in zip(again.parameters(), kept[number], strict=True):
                assert torch.equal(ours, theirs)
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{number}")


SEVERAL = [
    pytest.param(("cpu", "cuda:0")),
    pytest.param(
        ("cuda:0", "cuda:1"),
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("model", ["convolutional", "transformer"])
@pytest.mark.parametrize("devices", SEVERAL)
def test_placed_on_several_devices_it_trains_like_one_process(
    devices: tuple[str, str], model: str, micro_batches: int
) -> None:
    row = Row(model, 101, model == "transformer", micro_batches, False, 0.5)
    with shoal.init(seed=SEED) as world:
        found = train(world, row, "", shoal.DevicePlacement(devices), STEPS)
    assert distance(found, specification(row, STEPS)) < TOLERANCE


class ByHand(nn.Module):
    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(WIDTH, 8).to(devices[0])
        self.second = nn.Linear(8, 4).to(devices[1])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.devices[0])).tanh()
        output: Tensor = self.second(hidden.to(self.devices[1]))
        return output


@pytest.mark.parametrize("devices", SEVERAL)
def test_a_model_placed_by_hand_stays_where_it_is(devices: tuple[str, str]) -> None:
    found = []
    for places in (("cuda:0", "cuda:0"), devices):
        with shoal.init(seed=SEED) as world:
            model = shoal.parallelize(ByHand(places), world)
            assert [str(p.device) for p in model.parameters()] == [places[0]] * 2 + [places[1]] * 2
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            step = shoal.Step(model, optimizer, shoal.Task(loss), clip=1.0)
            batches = shoal.Loader(problem()[1], world, batch_size=40, micro_batches=2).epochs(2)
            found.append([step(batch).loss for batch in batches])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("layout", ["shard=1", "shard=2"])
def test_parameters_on_the_cpu_between_steps(started: Callable[[str], Ranks], layout: str) -> None:
    row = Row("transformer", 101, True, 2, False, 0.5)
    strategy = shoal.FSDP(modules=UNITS[row.model], cpu_offload=True)
    for result in started(layout).call(train, row, "", strategy, STEPS):
        assert distance(result, specification(row, STEPS)) < TOLERANCE
