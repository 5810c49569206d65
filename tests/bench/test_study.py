"""Small studies with real jobs: a factory's model on 1 and 2 processes, a script of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import Command, wait_for
from shoal.tools.bench.scaling.aggregate import scaling_points
from shoal.tools.bench.scaling.directory import load_study

pytestmark = pytest.mark.processes

MINE = """
import torch, torch.nn.functional as F, shoal

def loss(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])

def make():
    data = torch.randn(64, 8), torch.randint(0, 2, (64,))
    return lambda: torch.nn.Linear(8, 2), shoal.Task(loss), data
"""
SCRIPT = """
import sys, torch, shoal
from mine import loss, make

directory, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if batch > 8:
    raise MemoryError("Cannot allocate memory for 16 samples")
with shoal.init(seed=0) as world:
    model, task, data = make()
    model = shoal.parallelize(model, world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    loader = shoal.Loader(data, world, batch_size=batch)
    with shoal.Run(directory, step, loader) as run:
        for batch in loader.epochs(100):
            step(batch)
            run.tick()
            if step.number == steps:
                break
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


TINY = ("-n", "1,2", "--steps", "6", "--warmup", "2", "--rounds", "1", "--batch", "8", "--study", "s")
Study = Callable[..., Command]


@pytest.fixture
def study(here: Path, start_command: Callable[..., Command]) -> Study:
    """Starts a small study."""
    command = [sys.executable, "-m", "shoal", "bench", "scaling"]
    return lambda subject, *more: start_command([*command, subject, *TINY, *more])


@pytest.mark.full
def test_a_study_that_is_killed_leaves_nothing_running_and_goes_on(here: Path, study: Study) -> None:
    started = study("mine:make")
    wait_for(lambda: any(here.glob("s/jobs/*/round-0/run/events/*")))
    started.process.terminate()
    assert started.end().code == 143
    wait_for(lambda: started.members() == [])
    assert len(load_study(here / "s").missing()) == 2
    # It measures the same training on one and two processes.
    again = study("mine:make")
    ended = again.end(200)
    assert (ended.code, again.members()) == (0, []), ended.err + ended.out
    assert "2 processes give" in ended.out
    found = load_study(here / "s")
    one, two = (repeat.measured for repeat in found.repeats())
    assert one is not None
    assert two is not None
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    assert one.samples == two.samples == 48
    assert len(two.ranks) == 2
    assert two.parts["communication"] > 0
    for each in (one, two):
        assert each.parts in each.ranks
        assert sum(each.ranks[0].values()) * 6 == pytest.approx(each.seconds, rel=1e-6)
    assert found.missing() == []
    names = {path.name for path in (here / "s").iterdir()}
    plots = {f"{name}-strong.svg" for name in ("throughput", "iteration", "speedup")}
    assert {"index.html", "results.csv", "parts.png", *plots} <= names


@pytest.mark.long
def test_a_script_of_ones_own_is_studied_and_what_fails_is_a_row(here: Path, study: Study) -> None:
    ended = study("train.py", "--scaling", "weak", "--", "{run}", "{batch}", "{steps}").end(200)
    assert ended.code == 0, ended.err + ended.out
    told = " ".join(ended.out.split())
    assert "2 processes failed: out of memory: MemoryError: Cannot allocate memory" in told
    found = load_study(here / "s")
    one, two = scaling_points(found.options, found.repeats())
    assert one.rate is not None
    assert (two.rate, two.failed) == (None, 1)
