"""One live run per directory, whoever dies how; an attempt that was taken over changes nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from helpers.checkpoint_files import names, small_run
from helpers.commands import wait_for
from helpers.kill_in_save import HookedFiles
from helpers.ranks import RankError, Ranks
from shoal.checkpoint import AnyPath, Checkpoints, Fence, FencedFiles, fencing
from shoal.tools.report.coverage import coverage
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

STEPS = 10
JOB = "a-job-of-several-nodes"
HELD: list[Any] = []


class Stopped(HookedFiles, FencedFiles):
    """Stops this process before one operation after `arm`."""

    def __init__(self, fence: Fence, stop_at: int, note: Path) -> None:
        HookedFiles.__init__(self)
        FencedFiles.__init__(self, fence)
        self._left = stop_at
        self._note = note
        self.armed = False

    def at(self, number: int, path: AnyPath | None) -> None:
        if self.armed:
            self._left -= 1
            if self._left == -1:
                self._note.write_text(self.names[-1])
                # To this thread: another one would let this one go on for a moment.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def begin(world: shoal.World, folder: Path, attempt: int, stopper: int = -1, stop_at: int = -1) -> None:
    """Open the run, as the ranks of an attempt of a launcher of several nodes do."""
    world.placement = dataclasses.replace(world.placement, job=JOB, attempt=attempt)
    run = small_run(world, folder / "run", keep=1)
    files = Stopped(run.files.fence, stop_at, folder / "stopped")
    run.files.checkpoints = Checkpoints(folder / "run" / "checkpoints", world, keep=1, files=files)
    run.restore()
    HELD[:] = [run, run.steps["step"], run.loader.epochs(1), files, world.rank == stopper]


def go_on(_: shoal.World, last: int) -> None:
    """Train up to a step, saving each; the stopper is stopped in the save of step 2."""
    run, step, batches, files, stops = HELD
    while step.number < last:
        step(next(batches))
        files.armed = stops and step.number >= 2
        run.tick(every=1)
    run.save()


@pytest.fixture
def worlds() -> Iterator[list[Ranks]]:
    started: list[Ranks] = []
    yield started
    for each in started:
        each.kill()


def is_stopped(pid: int | None) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def taken_over(worlds: list[Ranks], folder: Path, size: int, stopper: int, moment: int) -> list[Any]:
    """An attempt is stopped in a save, another one goes on; what the first one's ranks raise."""
    old, new = Ranks(size), Ranks(size)
    worlds += [old, new]
    old.call(begin, folder, 0, stopper, moment)
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.extend(old.attempt(go_on, STEPS)), daemon=True)
    thread.start()
    pid = old.processes[stopper].pid
    wait_for((folder / "stopped").exists)
    wait_for(lambda: is_stopped(pid))
    new.call(begin, folder, 1)
    new.call(go_on, 5)
    assert names(folder / "run" / "checkpoints") == ["step-5"]
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    thread.join(120)
    assert len(outcomes) == size
    assert names(folder / "run" / "checkpoints") == ["step-5"]
    # What the old one may have left behind disturbs nothing.
    new.call(go_on, STEPS)
    assert names(folder / "run" / "checkpoints") == [f"step-{STEPS}"]
    assert coverage(folder / "run").exact
    with shoal.init() as world:
        restored = Checkpoints(folder / "run" / "checkpoints", world).restore()
        assert restored is not None
        assert (restored.step, restored.skipped) == (STEPS, ())
    for outcome in outcomes:
        assert isinstance(outcome, RankError)
        assert isinstance(outcome.error, CheckpointError), outcome.text
    return [(outcome.error.found, new.processes[0].pid) for outcome in outcomes]


@pytest.mark.parametrize("moment", [8, *(pytest.param(m, marks=pytest.mark.full) for m in (10, 18))])
def test_stopped_in_a_save_and_taken_over(moment: int, tmp_path: Path, worlds: list[Ranks]) -> None:
    """At operations of a save; test_commit_explored.py does so at all of them."""
    ((found, pid),) = taken_over(worlds, tmp_path, 1, 0, moment)
    assert f"attempt 2, process {pid} on {os.uname().nodename} since " in found


@pytest.mark.full
@pytest.mark.parametrize(("stopper", "moment"), [(0, 9), (1, 2)])
def test_all_ranks_are_told(stopper: int, moment: int, tmp_path: Path, worlds: list[Ranks]) -> None:
    """Rank 0 commits; rank 1 only writes its own file, maybe into a newer attempt's directory."""
    for found, pid in taken_over(worlds, tmp_path, 2, stopper, moment):
        assert f"attempt 2, process {pid} on" in found


def test_numbers_are_taken_once_and_the_highest_wins(tmp_path: Path) -> None:
    first, second = Fence(tmp_path / "attempts"), Fence(tmp_path / "attempts")
    first.check()  # knows no number yet
    first.number = first.take()
    first.check()
    second.number = second.take()
    second.check()
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(CheckpointError, match=f"attempt 2, process {os.getpid()} on ") as caught:
        first.check()
    assert "by attempt 1" in caught.value.given


def test_an_attempt_that_is_just_being_taken_counts(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    fence.number = fence.take()
    (tmp_path / "2.json").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="attempt 2, has taken over"):
        fence.check()
    shutil.rmtree(tmp_path)
    fence.check()  # a purged directory fences nobody


def test_ten_attempts_are_remembered(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    assert [fence.take() for _ in range(14)] == list(range(1, 15))
    assert len(list(tmp_path.iterdir())) == 10
    assert fence.newest() == 14


@pytest.mark.parametrize("before", [1, 3])
def test_a_directory_that_was_removed_and_begun_anew(before: int, tmp_path: Path) -> None:
    old, new = Fence(tmp_path / "attempts"), Fence(tmp_path / "attempts")
    for _ in range(before):
        old.number = old.take()
    shutil.rmtree(tmp_path / "attempts")
    old.check()
    new.number = new.take()
    new.check()
    assert new.number == 1
    with pytest.raises(CheckpointError, match=f"attempt 1, process {os.getpid()} on "):
        old.check()


@pytest.fixture
def two(worlds: list[Ranks]) -> Ranks:
    worlds.append(Ranks(2))
    return worlds[0]


def opened(world: shoal.World, directory: Path) -> shoal.Run:
    run = small_run(world, directory)
    run.restore()
    return run


def hold(world: shoal.World, directory: Path) -> int:
    """Open a run and leave it open; also to a fork, as a DataLoader's worker is, that lives on."""
    HELD.append(opened(world, directory))
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


@pytest.mark.full
def test_a_second_run_is_refused_on_all_ranks_until_the_first_is_gone(
    two: Ranks, tmp_path: Path
) -> None:
    two.call(hold, tmp_path)
    with shoal.init() as world:
        with pytest.raises(
            CheckpointError, match="another Run is open in this directory: process "
        ) as caught:
            opened(world, tmp_path)
        assert f"process {two.processes[0].pid} on" in caught.value.found
        assert "the world size here is 1), start all its processes with one" in caught.value.fix
        two.kill()
        held = opened(world, tmp_path)
        with Ranks(2) as others:
            others.errors(CheckpointError, opened, tmp_path)
        held.close()


def reopened(world: shoal.World, directory: Path) -> None:
    HELD[:] = [opened(world, directory), opened(world, directory)]
    while HELD:
        HELD.pop().close()


def test_one_process_may_open_it_again_and_another_after_it_is_closed(
    two: Ranks, tmp_path: Path
) -> None:
    two.call(reopened, tmp_path)
    with shoal.init() as world:
        opened(world, tmp_path).close()


def apart(world: shoal.World, directory: Path) -> None:
    # Of this name, as a node's own /tmp is: the disk of rank 1 is another one.
    fencing.SEEN_SECONDS = 0.2
    if world.rank:
        Fence._taken = lambda self: []  # type: ignore[method-assign]
    opened(world, directory)


def by_the_clock(world: shoal.World, directory: Path) -> None:
    opened(world, directory / f"run-{time.time()}-{world.rank}")


@pytest.mark.parametrize("how", [apart, by_the_clock])
def test_ranks_with_directories_of_their_own_are_refused(
    two: Ranks, tmp_path: Path, how: Callable[[shoal.World, Path], None]
) -> None:
    for error in two.errors(CheckpointError, how, tmp_path):
        assert "rank 1" in error.found
        assert "is missing" in error.found
