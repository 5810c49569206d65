"""What workers save that wait for nobody is whole, whatever was saved before in the same world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def saves(world: shoal.World, directory: Path) -> None:
    """In one run after another, with a rank 0 that begins to save later than the other could write."""
    for name in ("first", "second"):
        model = shoal.parallelize(nn.Linear(3, 1), world, shoal.Hogwild())
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
        loader = shoal.Loader((torch.ones(8, 3),), world, batch_size=4)
        with shoal.Run(directory / name, step, loader, trackers=()) as run:
            store: Any = run.files.checkpoints._store
            begin = store.begin

            def late(*sizes: int, begin: Any = begin) -> None:
                time.sleep(0.5)
                begin(*sizes)

            store.begin = late
            for batch in loader.epochs(1):
                step(batch)
                run.save()


def verify(directory: Path) -> str:
    command = [sys.executable, "-m", "shoal", "checkpoint", "verify", str(directory)]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    return verified.stdout


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_one_run_after_another_is_saved_as_a_whole(ranks: int, tmp_path: Path) -> None:
    with Ranks(ranks) as started:
        started.call(saves, tmp_path)
    for name in ("first", "second"):
        assert "step-2" in verify(tmp_path / name)


def loses_one(world: shoal.World, directory: Path) -> int:
    """Rank 2 dies when its part is there; rank 0 writes its own when the others have met again."""
    me = world.rank
    model = shoal.parallelize(nn.Linear(3, 1), world, shoal.Hogwild())
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    loader = shoal.Loader((torch.ones(6, 3),), world, batch_size=6)
    with shoal.Run(directory, step, loader, trackers=()) as run:
        store: Any = run.files.checkpoints._store
        background: Any = run.files.checkpoints.background
        write, collect = store.write, background.collect

        def late(*parts: Any) -> Any:
            while me == 0 and world.size == 3:
                time.sleep(0.01)
            return write(*parts)

        def told(part: Any) -> Any:
            found = collect(part)
            if me == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        store.write, background.collect = late, told
        for batch in loader.epochs(1):
            step(batch)
            run.save(wait=False)
            if me == 2:
                signal.pause()  # not in the meeting of the others when it dies
        shoal.evaluate(step, (torch.ones(6, 3),))
    return world.size


@pytest.mark.full
def test_who_dies_when_its_part_is_there_is_in_the_checkpoint(tmp_path: Path) -> None:
    with Ranks(3) as started:
        assert started.attempt(loses_one, tmp_path)[:2] == [2, 2]
    assert "step-1" in verify(tmp_path)
