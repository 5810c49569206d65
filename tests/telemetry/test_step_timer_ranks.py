"""Where the time of real ranks went: parts add up, and what is planted is found where it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.clocks import ManualClock
from helpers.ranks import Ranks
from shoal.telemetry import events, step_timer
from shoal.util.clock import CLOCK, Clock

pytestmark = pytest.mark.processes

WIDTH = 256
PLANTED = 0.03
"""Seconds of work or waiting that a rank has more than others, in each step."""

PARTS = step_timer.PARTS[1:]
MetricSums = dict[str, float]


class Net(nn.Module):
    """Two blocks that repeat, and work in forward on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.busy = 0.0
        self.clock: Clock = CLOCK

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.busy)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


class Rows(torch.utils.data.Dataset[Tensor]):
    """Samples that take their time."""

    def __init__(self, count: int, seconds: float = 0.0, clock: Clock = CLOCK) -> None:
        self.count = count
        self.clock = clock
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self.seconds:
            self.clock.sleep(self.seconds)
        return [torch.full((WIDTH,), float(index)) for index in indices]


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum() / WIDTH, len(output)


def built(world: shoal.World, strategy: Any, busy: float, clock: Clock = CLOCK) -> shoal.Step:
    torch.manual_seed(0)
    model = Net()
    model.busy, model.clock = busy, clock
    made = shoal.parallelize(model, world, strategy)
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-6)
    return shoal.Step(made, optimizer, shoal.Task(loss, inputs=lambda batch: batch), clip=1.0)


def trained(
    world: shoal.World,
    directory: Path,
    steps: int,
    strategy: Any = None,
    slow: int = -1,
    busy: int = -1,
    micro_batches: int = 1,
) -> float:
    """A loop that does nothing of its own; how many seconds its steps took, but for the first."""
    step = built(world, strategy, PLANTED if world.rank == busy else 0.0)
    rows = Rows(24 * steps, PLANTED if world.rank == slow else 0.0)
    data = shoal.Loader(rows, world, batch_size=24, micro_batches=micro_batches)
    with shoal.Run(directory, step, data, trackers=()) as run:
        ticked = []
        for batch in data.epochs(1):
            step(batch)
            if run.step % 400 == 0:
                shoal.evaluate(step, Rows(48))
            run.tick(every=300)
            ticked.append(time.perf_counter())
        return ticked[-1] - ticked[0]


def steps_of(directory: Path, rank: int, *, after: int = 0) -> list[dict[str, Any]]:
    path = directory / "events" / f"rank-{rank}.jsonl"
    return [e for e in events.read_events(path) if e["event"] == "step" and e["step"] > after]


def check_added_up(directory: Path, rank: int, seconds: float) -> None:
    """All time of the steps is theirs, and that of a usual step its parts'."""
    steps = steps_of(directory, rank)
    assert sum(step["wall"] for step in steps[1:]) == pytest.approx(seconds, rel=0.02)
    other = [step["wall"] - sum(step[part] for part in PARTS) for step in steps]
    assert min(other) > -1e-9
    # In single steps others may have had the core just then.
    shares = [each / step["wall"] for each, step in zip(other, steps, strict=True)]
    assert statistics.median(shares) < 0.05


def usual(directory: Path, rank: int) -> dict[str, float]:
    """The seconds of each part in a usual step, whatever stopped this process in single ones."""
    steps = steps_of(directory, rank, after=4)  # in the first ones collectives are compared before
    return {part: statistics.median(step[part] for step in steps) for part in PARTS}


@pytest.mark.full
@pytest.mark.realtime
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_parts_add_up_to_the_time_there_was(
    size: int, ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """1,000 steps with saves and evaluations, of a loop whose own part is nothing."""
    took = ranks_of(size).call(trained, tmp_path, 1000)
    for rank, seconds in enumerate(took):
        check_added_up(tmp_path, rank, seconds)
        shown = {part for part in PARTS for step in steps_of(tmp_path, rank) if step[part] > 0}
        assert shown == set(PARTS) - {"transfer"} - ({"communication"} if size == 1 else set())


STRATEGIES = {
    "fsdp": ("shard=2", shoal.FSDP(modules=("blocks.*",))),
    "tensor": (
        "tensor=2",
        shoal.TensorParallel(
            plan={"blocks.0": "column", "blocks.1": "row", "blocks.2": "column", "blocks.3": "row"}
        ),
    ),
    "pipeline": ("pipeline=2", shoal.Pipeline(split_points=("blocks.2",), schedule="1f1b")),
}


@pytest.mark.full
@pytest.mark.realtime
def test_a_slow_dataset_and_work_in_forward_are_found_where_they_are(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks_of(3).call(trained, tmp_path, 24, None, 1, 2)
    of_rank = [usual(tmp_path, rank) for rank in range(3)]
    for rank, part in ((1, "wait"), (2, "forward"), (0, "communication")):
        mine, *others = (of_rank[each][part] for each in (rank, *({0, 1, 2} - {rank})))
        assert mine > 0.7 * PLANTED
        assert mine > max(others)


def test_time_belongs_to_the_parts_of_a_step(world: shoal.World, tmp_path: Path) -> None:
    """The clock advances in the dataset and in forward only."""
    clock = ManualClock()
    world.timeline = step_timer.Timeline(clock)
    step = built(world, None, PLANTED, clock)
    data = shoal.Loader(Rows(24 * 3, 2 * PLANTED, clock), world, batch_size=24)
    with shoal.Run(tmp_path, step, data, trackers=()) as run:
        for batch in data.epochs(1):
            step(batch)
            run.tick()
            clock.sleep(PLANTED / 2)
    first, *others = steps_of(tmp_path, 0)
    for found in others:
        parts = {part: found[part] for part in PARTS if found[part] > 0}
        assert parts == pytest.approx({"wait": 2 * PLANTED, "forward": PLANTED})
        assert found["wall"] == pytest.approx(3.5 * PLANTED)
    assert first["forward"] >= PLANTED  # the loss is checked too


def test_what_making_a_batch_takes_is_recorded(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks_of(1).call(trained, tmp_path, 6, None, 0)
    assert all(step["load"] >= PLANTED for step in steps_of(tmp_path, 0))
    [start] = [e for e in events.read_events(tmp_path / "events/rank-0.jsonl") if e["event"] == "start"]
    assert (start["format"], start["workers"]) == (3, 0)


@pytest.mark.long
@pytest.mark.realtime
@pytest.mark.parametrize("name", STRATEGIES)
def test_who_is_waited_for_under_other_strategies(name: str, tmp_path: Path) -> None:
    layout, strategy = STRATEGIES[name]
    with Ranks(2, layout=layout) as two:
        took = two.call(trained, tmp_path, 60, strategy, 1, -1, 2 if name == "pipeline" else 1)
    for rank, seconds in enumerate(took):
        check_added_up(tmp_path, rank, seconds)
    first, second = (usual(tmp_path, rank) for rank in range(2))
    assert all(each[part] > 0 for each in (first, second) for part in ("forward", "backward"))
    assert second["wait"] > PLANTED > first["wait"]
    assert first["communication"] - second["communication"] > 0.5 * PLANTED


def two_steps(world: shoal.World, directory: Path) -> tuple[MetricSums, MetricSums]:
    """What two Steps say of themselves."""
    steps = {"first": built(world, None, 0.0), "second": built(world, None, PLANTED)}
    data = shoal.Loader(Rows(240), world, batch_size=24)
    sums: dict[str, MetricSums] = {name: dict.fromkeys(("forward", "backward"), 0.0) for name in steps}
    with shoal.Run(directory, steps, data, trackers=()) as run:
        for batch in data.epochs(1):
            for name, step in steps.items():
                result = step(batch)
                sums[name]["forward"] += result.forward
                sums[name]["backward"] += result.backward
            run.tick()
    return sums["first"], sums["second"]


def test_of_two_steps_each_has_its_own_time(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    said = ranks_of(1).call(two_steps, tmp_path)[0]
    lines = [e for e in events.read_events(tmp_path / "events/rank-0.jsonl") if e["event"] == "step"]
    for name, sums in zip(("first", "second"), said, strict=True):
        mine = [line for line in lines if line["name"] == name]
        for part, seconds in sums.items():
            assert sum(line[part] for line in mine) == pytest.approx(seconds, rel=0.01, abs=1e-4)
        assert any(line["wait"] for line in mine) == (name == "first")
