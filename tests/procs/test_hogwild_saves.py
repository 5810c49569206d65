"""What workers save that wait for nobody is whole, whatever was saved before in the same world."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from ranks import Ranks


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def saves(world: shoal.World, directory: Path) -> None:
    """In one run after another, with a rank 0 that begins to save later than the other could write."""
    for name in ("first", "second"):
        model = shoal.parallelize(nn.Linear(3, 1), world, shoal.Hogwild())
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
        loader = shoal.Loader((torch.ones(8, 3),), world, batch_size=4)
        with shoal.Run(directory / name, step, loader, trackers=()) as run:
            store: Any = run.checkpoints._store
            begin = store.begin

            def late(*sizes: int, begin: Any = begin) -> None:
                time.sleep(0.5)
                begin(*sizes)

            store.begin = late
            for batch in loader.epochs(1):
                step(batch)
                run.save()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_one_run_after_another_is_saved_as_a_whole(ranks: int, tmp_path: Path) -> None:
    with Ranks(ranks) as started:
        started.call(saves, tmp_path)
    for name in ("first", "second"):
        command = [sys.executable, "-m", "shoal", "checkpoint", "verify", str(tmp_path / name)]
        verified = subprocess.run(command, capture_output=True, text=True)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "step-2" in verified.stdout
