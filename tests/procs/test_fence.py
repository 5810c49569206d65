"""An attempt that was stopped and taken over: whatever it was doing, it changes nothing any more."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import Command, wait_for
from ranks import free_port
from shoal.checkpoint import Checkpoints, Fence
from shoal.data.audit import coverage
from shoal.errors import CheckpointError
from shoal.world import init

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

import shoal
from hooked import HookedFiles
from shoal.checkpoint import Checkpoints, FencedFiles

here, stop_at, last, stopper = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


class Stopped(HookedFiles, FencedFiles):
    '''Stops this process before one operation of the second save.'''

    def __init__(self, fence):
        HookedFiles.__init__(self)
        FencedFiles.__init__(self, fence)
        self.counting = False
        self.left = stop_at

    def at(self, number, path):
        if self.counting:
            self.left -= 1
            if self.left == -1:
                (here / "stopped").write_text(self.names[-1])
                os.kill(os.getpid(), signal.SIGSTOP)


with shoal.init(seed=0) as world:
    model = shoal.parallelize(nn.Linear(3, 1).double(), world)
    task = shoal.Task(lambda output, batch: (output.square().sum(), len(output)))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
    data = shoal.Loader((torch.arange(120.0).double().reshape(40, 3) / 100,), world, batch_size=4)
    with shoal.Run(here / "run", step, data, keep=1) as run:
        files = Stopped(run._fence)
        run.checkpoints = Checkpoints(here / "run" / "checkpoints", world, keep=1, files=files)
        run.restore()
        for batch in data.epochs(1):
            step(batch)
            files.counting = world.rank == stopper and step.number == 2 and stop_at >= 0
            run.tick(every=1)
            if step.number == last:
                (here / f"at-{last}-{world.rank}").touch()
                while not (here / "go").exists():
                    time.sleep(0.01)
        run.save()
"""


class Attempt(Command):
    """One rank of an attempt at the same run; attempts are those of one launcher."""

    def __init__(
        self, folder: Path, number: int, *options: int, rank: int = 0, size: int = 1, port: int = 0
    ) -> None:
        variables = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": number,
            "TORCHELASTIC_RUN_ID": "shoal-run-nodes-test",
        }  # fmt: skip
        script = folder / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = [sys.executable, str(script), str(folder), *map(str, options)]
        super().__init__(["env", *settings, *command], folder)


@pytest.fixture
def attempts() -> Iterator[list[Attempt]]:
    started: list[Attempt] = []
    yield started
    for each in started:
        each.clean_up()


def steps_there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


# Of the save of step 2: the first files, the manifest, the rename that publishes, the old one's end.
MOMENTS = [0, 1, 3, 7, 8, 11, 13, 15]


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=() if m in (3, 13) else pytest.mark.full) for m in MOMENTS]
)
def test_stopped_in_a_save_and_taken_over(moment: int, tmp_path: Path, attempts: list[Attempt]) -> None:
    old = Attempt(tmp_path, 0, moment, 99, 0)
    attempts.append(old)
    wait_for((tmp_path / "stopped").exists)
    wait_for(lambda: psutil.Process(old.process.pid).status() == psutil.STATUS_STOPPED)
    new = Attempt(tmp_path, 1, -1, 5, 0)
    attempts.append(new)
    wait_for((tmp_path / "at-5-0").exists)
    assert steps_there(tmp_path) == ["step-5"]
    os.kill(old.process.pid, signal.SIGCONT)
    ended = old.end()
    assert ended.code == 1
    assert f"attempt 2, process {new.process.pid} on {os.uname().nodename} since " in ended.err
    assert "CheckpointError" in ended.err
    assert steps_there(tmp_path) == ["step-5"]
    (tmp_path / "go").touch()
    assert new.end().code == 0
    assert steps_there(tmp_path) == ["step-10"]
    assert coverage(tmp_path / "run").exact
    with init() as world:
        restored = Checkpoints(tmp_path / "run" / "checkpoints", world).restore()
        assert restored is not None
        assert (restored.step, restored.skipped) == (10, ())


@pytest.mark.full
@pytest.mark.parametrize("stopper", [0, 1])
def test_two_ranks_one_of_them_stopped(stopper: int, tmp_path: Path, attempts: list[Attempt]) -> None:
    """Rank 0 commits; rank 1 only writes its own file, maybe into a newer attempt's directory."""
    port = free_port()
    old = [Attempt(tmp_path, 0, 1, 99, stopper, rank=r, size=2, port=port) for r in range(2)]
    attempts.extend(old)
    wait_for((tmp_path / "stopped").exists)
    port = free_port()
    new = [Attempt(tmp_path, 1, -1, 5, 0, rank=r, size=2, port=port) for r in range(2)]
    attempts.extend(new)
    wait_for(lambda: all((tmp_path / f"at-5-{rank}").exists() for rank in range(2)))
    os.kill(old[stopper].process.pid, signal.SIGCONT)
    for each in old:
        ended = each.end()
        assert ended.code == 1
        assert "attempt 2, process" in ended.err
    assert steps_there(tmp_path) == ["step-5"]
    (tmp_path / "go").touch()
    assert [each.end().code for each in new] == [0, 0]
    assert steps_there(tmp_path) == ["step-10"]
    assert coverage(tmp_path / "run").exact


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


def test_a_purged_directory_fences_nobody(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "attempts")
    fence.number = fence.take()
    (tmp_path / "attempts" / "1.json").unlink()
    (tmp_path / "attempts").rmdir()
    fence.check()
