"""Training whose checkpoints are in an object store: killed, taken over, refused; nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.object_store import Bucket, nothing
from helpers.ranks import RankError, Ranks
from shoal.checkpoint import Checkpoints, path_from
from shoal.report.coverage import coverage
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

SAMPLES, BATCH, STEPS, EPOCHS = 41, 12, 8, 2


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt; rank `victim` is killed at an operation of the save of step 3, or refused it."""

    folder: Path
    run: str = "run"
    last: int = STEPS
    victim: int = -1
    operation: int = -1
    refused: bool = False


class Fault:
    """Counts the operations of one save."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.armed = False
        self.done: list[str] = []

    def __call__(self, operation: str, key: str) -> None:
        if not self.armed:
            return
        self.done.append(operation)
        if self._attempt.refused and operation == "complete":
            raise PermissionError("not today")
        if len(self.done) - 1 == self._attempt.operation:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What an attempt came to on one rank."""

    restored: int | None
    weights: list[Tensor]
    operations: list[str]
    failed: list[str]


def train(world: shoal.World, attempt: Attempt) -> Ended:
    """The same the first time and after every kill."""
    fault = Fault(attempt)
    if world.rank == attempt.victim:
        Bucket.before = fault
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1)), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, optimizer, task)
    samples = torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / 100
    data = shoal.Loader((samples,), world, batch_size=BATCH)
    url = f"bucket://{attempt.folder}/store"
    failed = []
    with shoal.Run(
        attempt.folder / attempt.run, step, data, checkpoints=url, keep=1, trackers=()
    ) as run:
        restored = run.restore()
        for batch in data.epochs(EPOCHS):
            step(batch)
            run.tick()
            fault.armed = step.number == 3
            try:
                run.save()
            except CheckpointError as error:
                failed.append(error.found)
            fault.armed = False
            if step.number == attempt.last:
                break
    Bucket.before = staticmethod(nothing)
    return Ended(
        restored=None if restored is None else restored.step,
        weights=[parameter.detach().clone() for parameter in model.parameters()],
        operations=fault.done,
        failed=failed,
    )


def kept(folder: Path) -> list[str]:
    place = path_from(f"bucket://{folder}/store/checkpoints")
    return sorted(path.name for path in place.iterdir())


def same(left: list[Ended], right: list[Ended]) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one.weights, other.weights, strict=True)
    )


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """A run of two ranks; of rank 0 and rank 1 the operations of the save of step 3."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = two.call(train, Attempt(folder=folder, victim=0))
    other = two.call(train, Attempt(folder=folder / "again", victim=1))
    assert same(ended, other)
    assert kept(folder) == ["step-8.a1"]
    return [ended[0], other[1]]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.full
def test_a_run_goes_on_on_another_number_of_ranks(two: Ranks, tmp_path: Path) -> None:
    two.call(train, Attempt(folder=tmp_path, last=3))
    with Ranks(1) as one:
        (ended,) = one.call(train, Attempt(folder=tmp_path, last=6))
    assert ended.restored == 3
    assert coverage(tmp_path / "run").exact
    assert kept(tmp_path) == ["step-6.a2"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["events", "lock"]


MOMENTS = [(0, 0.3), (0, 0.6), (0, 0.75), (0, 0.9), (1, 0.5)]


@pytest.mark.full
@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
def test_killed_in_a_save(
    victim: int, moment: float, two: Ranks, undisturbed: list[Ended], tmp_path: Path
) -> None:
    """On the same number of ranks it ends bit-equal."""
    operations = undisturbed[victim].operations
    number = int(moment * len(operations))
    with Ranks(2) as ranks:
        attempt = Attempt(folder=tmp_path, victim=victim, operation=number)
        assert ranks.call_until_killed(train, attempt) is None
    ended = two.call(train, Attempt(folder=tmp_path))
    assert ended[0].restored in (2, 3)
    assert same(ended, undisturbed)
    assert coverage(tmp_path / "run").exact
    assert kept(tmp_path) == ["step-8.a2"]


@pytest.mark.full
def test_a_refusal_on_one_rank_is_told_on_all_and_the_run_goes_on(two: Ranks, tmp_path: Path) -> None:
    attempt = Attempt(folder=tmp_path, last=4, victim=1, refused=True)
    ended = two.call(train, attempt)
    for each in ended:
        (found,) = each.failed
        assert found.startswith("rank 1: [Errno 13] ")
        assert "not today" in found
        assert f"bucket://{tmp_path}/store/checkpoints/step-3.a1/rank-1.safetensors" in found
    assert kept(tmp_path) == ["step-4.a1"]


HELD: list[object] = []


def hold(world: shoal.World, folder: Path, run: str) -> int:
    """Open a run and keep it open; where it goes on."""
    model = shoal.parallelize(nn.Linear(3, 1), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    data = shoal.Loader((torch.ones(SAMPLES, 3),), world, batch_size=BATCH)
    url = f"bucket://{folder}/store"
    opened = shoal.Run(folder / run, step, data, checkpoints=url, keep=1, trackers=())
    restored = opened.restore()
    HELD[:] = [opened, step, data.epochs(9)]
    return -1 if restored is None else restored.step


def one_more(world: shoal.World) -> str:
    run, step, batches = HELD
    assert isinstance(run, shoal.Run)
    step(next(batches))  # type: ignore[operator, call-overload]
    run.tick()
    return str(run.save())


def let_go(_: shoal.World) -> None:
    run = HELD.pop(0)
    assert isinstance(run, shoal.Run)
    run.close()


@pytest.mark.full
def test_attempts_on_machines_that_share_nothing_but_the_store(two: Ranks, tmp_path: Path) -> None:
    """No lock reaches the other; the newer one goes on, the older one is told so on all ranks."""
    assert two.call(hold, tmp_path, "here") == [-1, -1]
    two.call(one_more)
    with Ranks(1) as other:
        assert other.call(hold, tmp_path, "there") == [1]
        for outcome in two.attempt(one_more):
            assert isinstance(outcome, RankError)
            assert isinstance(outcome.error, CheckpointError)
            assert "attempt 2, process " in outcome.error.found
        two.call(let_go)
        (path,) = other.call(one_more)
    assert path == f"bucket://{tmp_path}/store/checkpoints/step-2.a2"
    with shoal.init() as world:
        loaded = Checkpoints(path_from(path).parent, world).restore()
        assert loaded is not None
        assert (loaded.step, loaded.skipped) == (2, ())


def without_fsspec(world: shoal.World, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setitem(sys.modules, "fsspec.core", None)
        hold(world, folder, "run")


@pytest.mark.full
def test_what_one_rank_lacks_all_are_told(two: Ranks, tmp_path: Path) -> None:
    for outcome in two.attempt(without_fsspec, tmp_path):
        assert isinstance(outcome, RankError)
        assert isinstance(outcome.error, CheckpointError)
        assert "rank 1: fsspec is not installed" in outcome.error.found
        assert outcome.error.fix == "run pip install '.[remote]' in your Shoal checkout"


def test_another_directory_of_this_machine(tmp_path: Path) -> None:
    """Synced and renamed as ever; the fence is beside the checkpoints."""
    with shoal.init() as world:
        model = shoal.parallelize(nn.Linear(3, 1), world)
        task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
        data = shoal.Loader((torch.ones(SAMPLES, 3),), world, batch_size=BATCH)
        elsewhere = f"file://{tmp_path}/b"
        with shoal.Run(tmp_path / "a", step, data, checkpoints=elsewhere, trackers=()) as run:
            for batch in data.epochs(1):
                step(batch)
                run.tick(every=2)
            run.save(to="best")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*"))
    assert found == [
        "a/events/rank-0.jsonl",
        "b/attempts/1.json",
        "b/best/step-4",
        "b/checkpoints/step-2",
        "b/checkpoints/step-4",
    ]
