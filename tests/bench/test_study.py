"""Small studies with real jobs: a factory's model on 1 and 2 processes, a script of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.commands import GONE_WITHIN, Command, Ended, wait_for
from shoal.bench.scaling.aggregate import scaling_points
from shoal.bench.scaling.directory import load_study

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


def bench(folder: Path, *arguments: str) -> Ended:
    started = Command([sys.executable, "-m", "shoal", "bench", *arguments], folder)
    try:
        ended = started.end(200)
        assert started.members() == []
    finally:
        started.clean_up()
    return ended


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


TINY = ("--steps", "6", "--warmup", "2", "--rounds", "1", "--batch", "8", "--study", "s")


@pytest.mark.full
def test_a_study_that_is_killed_leaves_nothing_running_and_goes_on(here: Path) -> None:
    command = [sys.executable, "-m", "shoal", "bench", "scaling", "mine:make", "-n", "1,2", *TINY]
    started = Command(command, here)
    try:
        wait_for(lambda: any(here.glob("s/jobs/*/round-0/run/events/*")))
        started.process.terminate()
        assert started.end().code == 143
        wait_for(lambda: started.members() == [], GONE_WITHIN)
    finally:
        started.clean_up()
    study = load_study(here / "s")
    assert len(study.missing()) == 2
    check_study(here)


def check_study(here: Path) -> None:
    """A study measures the same training on one and two processes."""
    ended = bench(here, "scaling", "mine:make", "-n", "1,2", *TINY)
    assert ended.code == 0, ended.err + ended.out
    assert "2 processes give" in ended.out
    study = load_study(here / "s")
    one, two = (repeat.measured for repeat in study.repeats())
    assert one is not None
    assert two is not None
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    assert one.samples == two.samples == 48
    assert len(two.ranks) == 2
    assert two.parts["communication"] > 0
    for found in (one, two):
        assert found.parts in found.ranks
        assert sum(found.ranks[0].values()) * 6 == pytest.approx(found.seconds, rel=1e-6)
    assert study.missing() == []
    names = {path.name for path in (here / "s").iterdir()}
    plots = {f"{name}-strong.svg" for name in ("throughput", "iteration", "speedup")}
    assert {"index.html", "results.csv", "parts.png", *plots} <= names


@pytest.mark.long
def test_a_script_of_ones_own_is_studied_and_what_fails_is_a_row(here: Path) -> None:
    given = ("-n", "1,2", "--scaling", "weak", *TINY, "--", "{run}", "{batch}", "{steps}")
    ended = bench(here, "scaling", "train.py", *given)
    assert ended.code == 0, ended.err + ended.out
    told = " ".join(ended.out.split())
    assert "2 processes failed: out of memory: MemoryError: Cannot allocate memory" in told
    study = load_study(here / "s")
    one, two = scaling_points(study.options, study.repeats())
    assert one.rate is not None
    assert (two.rate, two.failed) == (None, 1)
