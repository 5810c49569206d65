"""A step that fails on one rank, where each takes its own, and is caught: the ranks stay together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from ranks import Ranks

STEPS = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout=60.0, prepare_timeout=60.0) as started:
        yield started


class Loss:
    """Fails in the step after so many: with a number that is none, or by an error of the user's own."""

    def __init__(self, at: int, how: str) -> None:
        self.steps = 0
        self._at, self._how = at, how

    def __call__(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        if self.steps == self._at and self._how == "raises":
            raise ValueError("a bad sample")
        return output.square().sum() * (torch.nan if self.steps == self._at else 1.0), len(output)


def go_on(world: shoal.World, strategy: Any, at: int, how: str, directory: Path) -> Any:
    """Rank 1 fails, catches that, and goes on; what it was told, and how far the ranks have come."""
    model = shoal.parallelize(nn.Linear(3, 1), world, strategy)
    loss = Loss(at if world.rank == 1 else -1, how)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    loader = shoal.Loader((torch.ones(4 * STEPS, 3),), world, batch_size=4)
    told = []
    with shoal.Run(directory, step, loader, trackers=()) as run:
        for number, batch in enumerate(loader.epochs(1)):
            loss.steps = number
            try:
                step(batch)
            except (ValueError, shoal.StepError) as error:
                told.append(str(error))
            run.tick(every=2)
            run.save(to="best")
        loss.steps = STEPS
        samples = shoal.evaluate(step, (torch.ones(6, 3),))["samples"]
        run.save()
    return told, step.number, samples


@pytest.mark.parametrize(
    ("strategy", "at", "how"),
    [
        (shoal.LocalSGD(every=3), 2, "nan"),
        (shoal.Hogwild(), 0, "raises"),
        pytest.param(shoal.Hogwild(staleness=0), 3, "nan", marks=pytest.mark.full),
        pytest.param(shoal.Hogwild(server=True), 3, "raises", marks=pytest.mark.full),
        pytest.param(shoal.LocalSGD(every=3), 0, "raises", marks=pytest.mark.full),
        pytest.param(shoal.DiLoCo(every=3), 5, "nan", marks=pytest.mark.full),
    ],
)
def test_who_fails_alone_goes_on_with_the_others(
    strategy: Any, at: int, how: str, ranks: Ranks, tmp_path: Path
) -> None:
    (nothing, *first), (told, *second) = ranks.call(go_on, strategy, at, how, tmp_path)
    assert nothing == []
    assert len(told) == 1
    assert ("a bad sample" if how == "raises" else "over this rank's share") in told[0]
    assert first == second == [STEPS, 6]
    command = [sys.executable, "-m", "shoal", "checkpoint", "verify", str(tmp_path)]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
