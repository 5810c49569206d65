"""A job that fails again at the same rank, line and step ends; others are restarted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import shoal

def loss(output, batch):
    step = run.step
    if world.rank == 1 and step == 3 + {moves} * world.placement.attempt:
        raise ValueError("a bad sample")
    return output.square().sum(), len(output)

with shoal.init() as world:
    model = shoal.parallelize(torch.nn.Linear(4, 1), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = shoal.Step(model, optimizer, shoal.Task(loss, inputs=lambda batch: batch))
    loader = shoal.Loader(torch.ones(80, 4), world, batch_size=8)
    with shoal.Run("run", step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(1):
            step(batch)
            run.tick(every=2)
"""


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("moves", [pytest.param(0, marks=pytest.mark.long), 1])
def test_restarts_end_where_the_failure_repeats(tmp_path: Path, moves: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(moves=moves))
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "--restarts", "2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a bad sample") == (3 if moves else 2)
    if not moves:
        place = f"rank 1, {script}:9, after step 3"
        assert done.stderr.endswith(f"no restart: the same failure twice in a row: {place}\n")
        assert f"{script}:9, after step 3 (the other was stopped)\nrestart 1 of 2\n" in done.stderr
