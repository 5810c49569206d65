"""An attempt that was stopped and taken over: whatever it was doing, it changes nothing any more."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import shoal
from helpers.commands import wait_for
from helpers.kill_in_save import HookedFiles
from helpers.ranks import RankError, Ranks
from shoal.checkpoint import AnyPath, Checkpoints, Fence, FencedFiles
from shoal.report.coverage import coverage
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

SAMPLES, BATCH, STEPS = 40, 4, 10
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
    model = shoal.parallelize(nn.Linear(3, 1).double(), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    samples = torch.arange(3.0 * SAMPLES).double().reshape(SAMPLES, 3) / 100
    data = shoal.Loader((samples,), world, batch_size=BATCH)
    run = shoal.Run(folder / "run", step, data, keep=1)
    files = Stopped(run.files.fence, stop_at, folder / "stopped")
    run.files.checkpoints = Checkpoints(folder / "run" / "checkpoints", world, keep=1, files=files)
    run.restore()
    HELD[:] = [run, step, data.epochs(1), files, world.rank == stopper]


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


def steps_there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


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
    assert steps_there(folder) == ["step-5"]
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    thread.join(120)
    assert len(outcomes) == size
    assert steps_there(folder) == ["step-5"]
    # What the old one may have left behind disturbs nothing.
    new.call(go_on, STEPS)
    assert steps_there(folder) == [f"step-{STEPS}"]
    assert coverage(folder / "run").exact
    with shoal.init() as world:
        restored = Checkpoints(folder / "run" / "checkpoints", world).restore()
        assert restored is not None
        assert (restored.step, restored.skipped) == (STEPS, ())
    for outcome in outcomes:
        assert isinstance(outcome, RankError)
        assert isinstance(outcome.error, CheckpointError), outcome.text
    return [(outcome.error.found, new.processes[0].pid) for outcome in outcomes]


MOMENTS = (0, 4, 10, 15, 18)


@pytest.mark.parametrize("moment", [8, *(pytest.param(m, marks=pytest.mark.full) for m in MOMENTS)])
def test_stopped_in_a_save_and_taken_over(moment: int, tmp_path: Path, worlds: list[Ranks]) -> None:
    """At each operation of a save: files, manifest, the rename, the removal of the one before."""
    ((found, pid),) = taken_over(worlds, tmp_path, 1, 0, moment)
    assert f"attempt 2, process {pid} on {os.uname().nodename} since " in found


@pytest.mark.full
@pytest.mark.parametrize(("stopper", "moment"), [(0, 9), (1, 0), (1, 2)])
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


def test_a_purged_directory_fences_nobody(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "attempts")
    fence.number = fence.take()
    (tmp_path / "attempts" / "1.json").unlink()
    (tmp_path / "attempts").rmdir()
    fence.check()
