"""Training whose checkpoints are in an object store: killed, taken over, refused; nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from helpers.checkpoint_files import names, small_run
from helpers.object_store import Bucket, nothing
from helpers.ranks import Ranks
from shoal.checkpoint import Checkpoints, path_from
from shoal.tools.report.coverage import coverage
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt; rank `victim` is killed at an operation of the save of step 3, or refused it."""

    folder: Path
    last: int = STEPS
    victim: int = -1
    operation: int = -1
    refused: bool = False


class Fault:
    """Counts the operations of one save."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._attempt = attempt
        self._strikes = rank == attempt.victim
        self.armed = False
        self.done: list[str] = []

    def __call__(self, operation: str, key: str) -> None:
        if not self.armed:
            return
        self.done.append(operation)
        if self._strikes and self._attempt.refused and operation == "complete":
            raise PermissionError("not today")
        if self._strikes and len(self.done) - 1 == self._attempt.operation:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What an attempt came to on one rank."""

    restored: int | None
    weight: Tensor
    operations: list[str]
    failed: list[str]


def remote_run(world: shoal.World, folder: Path, run: str = "run") -> shoal.Run:
    url = f"bucket://{folder}/store"
    return small_run(world, folder / run, checkpoints=url, keep=1, trackers=())


def train(world: shoal.World, attempt: Attempt) -> Ended:
    """The same the first time and after every kill."""
    Bucket.before = fault = Fault(attempt, world.rank)
    failed = []
    with remote_run(world, attempt.folder) as run:
        restored = run.restore()
        step = run.steps["step"]
        for batch in run.loader.epochs(1):
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
        weight=step.model.weight.detach().clone(),  # type: ignore[operator]
        operations=fault.done,
        failed=failed,
    )


def kept(folder: Path) -> list[str]:
    return names(path_from(f"bucket://{folder}/store/checkpoints"))


@pytest.fixture(scope="module")
def two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(2)


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended: list[Ended] = two.call(train, Attempt(folder=folder))
    assert kept(folder) == ["step-8.a1"]
    return ended


@pytest.mark.full
def test_a_run_goes_on_on_another_number_of_ranks(two: Ranks, tmp_path: Path) -> None:
    two.call(train, Attempt(folder=tmp_path, last=3))
    with Ranks(1) as one:
        (ended,) = one.call(train, Attempt(folder=tmp_path, last=6))
    assert ended.restored == 3
    assert coverage(tmp_path / "run").exact
    assert kept(tmp_path) == ["step-6.a2"]
    assert names(tmp_path / "run") == ["events", "lock"]


@pytest.mark.full
@pytest.mark.parametrize(("victim", "moment"), [(0, 0.6), (0, 0.9), (1, 0.5)])
def test_killed_in_a_save(
    victim: int, moment: float, two: Ranks, undisturbed: list[Ended], tmp_path: Path
) -> None:
    """On the same number of ranks it ends bit-equal."""
    number = int(moment * len(undisturbed[victim].operations))
    with Ranks(2) as ranks:
        attempt = Attempt(folder=tmp_path, victim=victim, operation=number)
        assert ranks.call_until_killed(train, attempt) is None
    for ended, expected in zip(two.call(train, Attempt(folder=tmp_path)), undisturbed, strict=True):
        assert ended.restored in (2, 3)
        assert torch.equal(ended.weight, expected.weight)
    assert coverage(tmp_path / "run").exact
    assert kept(tmp_path) == ["step-8.a2"]


@pytest.mark.full
def test_a_refusal_on_one_rank_is_told_on_all_and_the_run_goes_on(two: Ranks, tmp_path: Path) -> None:
    for each in two.call(train, Attempt(folder=tmp_path, last=4, victim=1, refused=True)):
        (found,) = each.failed
        assert found.startswith("rank 1: [Errno 13] ")
        assert "not today" in found
        assert f"bucket://{tmp_path}/store/checkpoints/step-3.a1/rank-1.safetensors" in found
    assert kept(tmp_path) == ["step-4.a1"]


HELD: list[shoal.Run] = []


def hold(world: shoal.World, folder: Path, run: str) -> int:
    """Open a run and keep it open; where it goes on."""
    HELD[:] = [remote_run(world, folder, run)]
    restored = HELD[0].restore()
    return -1 if restored is None else restored.step


def one_more(_: shoal.World) -> str:
    (run,) = HELD
    run.steps["step"](next(run.loader.epochs(9)))
    run.tick()
    return str(run.save())


def let_go(_: shoal.World) -> None:
    HELD.pop().close()


@pytest.mark.full
def test_attempts_on_machines_that_share_nothing_but_the_store(two: Ranks, tmp_path: Path) -> None:
    """No lock reaches the other; the newer one goes on, the older one is told so on all ranks."""
    assert two.call(hold, tmp_path, "here") == [-1, -1]
    two.call(one_more)
    with Ranks(1) as other:
        assert other.call(hold, tmp_path, "there") == [1]
        for error in two.errors(CheckpointError, one_more):
            assert "attempt 2, process " in error.found
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
        remote_run(world, folder)


@pytest.mark.full
def test_what_one_rank_lacks_all_are_told(two: Ranks, tmp_path: Path) -> None:
    for error in two.errors(CheckpointError, without_fsspec, tmp_path):
        assert "rank 1: fsspec is not installed" in error.found
        assert error.fix == "run pip install '.[remote]' in your Shoal checkout"


def test_another_directory_of_this_machine(world: shoal.World, tmp_path: Path) -> None:
    """Synced and renamed as ever; the fence is beside the checkpoints."""
    elsewhere = f"file://{tmp_path}/b"
    with small_run(world, tmp_path / "a", checkpoints=elsewhere, trackers=()) as run:
        for batch in run.loader.epochs(1):
            run.steps["step"](batch)
            run.tick(every=5)
        run.save(to="best")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*"))
    assert found == [
        "a/events/rank-0.jsonl",
        "b/attempts/1.json",
        "b/best/step-10",
        "b/checkpoints/step-10",
        "b/checkpoints/step-5",
    ]
