"""Workers of Hogwild under `shoal run`: one that is killed, one that fails, a stop after a death."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import Command, wait_for
from shoal.distributed.cluster_env import REQUEUE

pytestmark = pytest.mark.processes

PATIENCE = 200.0

TRAINING = """
import os, signal, sys
from pathlib import Path
import torch, shoal

def loss(output, batch):
    return (output - batch[1]).square().sum(), len(output)

victims, how, epochs = [*map(int, sys.argv[1].split(","))], sys.argv[2], int(sys.argv[3])

def train(directory, victim, epochs):
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    samples = inputs, inputs.sum(1, keepdim=True)
    net = torch.nn.Linear(4, 1)
    model = shoal.parallelize(net, world, shoal.Hogwild(max_staleness=5))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    loader = shoal.Loader(samples, world, batch_size=12)
    with shoal.Run(directory, step, loader, trackers=()) as run:
        run.restore()
        for batch in loader.epochs(epochs):
            step(batch)
            run.tick()
            if me == victim and step.number == 5:
                if how == "raises":
                    raise ValueError("a mistake")
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == 30:
                Path(f"ready{me}-{directory}").touch()
        run.save()
    print(f"{shoal.evaluate(step, samples)['samples']} samples on {world.size}", flush=True)

with shoal.init() as world:
    me = world.rank
    for number, victim in enumerate(victims):
        last = number + 1 == len(victims)
        train("run" if last else f"run{number}", victim, epochs if last else 8)
"""

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, start_command: Start) -> Start:
    """Starts three workers."""
    (tmp_path / "training.py").write_text(TRAINING)
    command = [sys.executable, "-m", "shoal", "run", "-n", "3", "training.py", "--"]
    return lambda *arguments: start_command([*command, *arguments])


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    "victim",
    [pytest.param("0", marks=pytest.mark.full), pytest.param("2", marks=pytest.mark.long)],
)
def test_the_others_go_on_without_one_that_is_killed(victim: str, start: Start) -> None:
    ended = start(victim, "dies", "8").end(PATIENCE)
    assert ended.code == 0, ended.err
    assert ended.out.count("60 samples on 2") == 2
    assert f"rank {victim} of 3: killed by SIGKILL" in ended.err
    assert "the others continue" in ended.err


@pytest.mark.long
def test_a_worker_that_raises_ends_the_run(start: Start) -> None:
    """That is a mistake in the script, and to be seen."""
    ended = start("1", "raises", "1000000").end(PATIENCE)
    assert ended.code == 1
    assert "ValueError: a mistake" in ended.err
    assert "where: rank 1 of 3" in ended.err


@pytest.mark.long
def test_after_a_death_a_signal_saves_and_stops(start: Start, tmp_path: Path) -> None:
    command = start("1", "dies", "1000000")
    wait_for(lambda: all((tmp_path / f"ready{rank}-run").exists() for rank in (0, 2)), PATIENCE)
    command.process.terminate()
    ended = command.end(PATIENCE)
    assert ended.code == REQUEUE, ended.err
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.long
def test_one_run_after_another_loses_a_worker_and_the_last_one_stops(
    start: Start, tmp_path: Path
) -> None:
    """Rank 0 in the first, of three; then the last of two, which the one that is left asks for."""
    command = start("0,2", "dies", "1000000")
    ready = tmp_path / "ready1-run"
    wait_for(lambda: ready.exists() or command.process.poll() is not None, PATIENCE)
    command.process.terminate()
    ended = command.end(PATIENCE)
    assert ended.code == REQUEUE, ended.err
    assert ended.out.count("60 samples on 2") == 2
    assert len(checkpoints(tmp_path)) == 1
