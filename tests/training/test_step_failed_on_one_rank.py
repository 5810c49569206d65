"""A step that fails on one rank, where each takes its own, and is caught: the ranks stay together."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers import cli
from helpers.ranks import Ranks
from helpers.small_training import step_of

pytestmark = pytest.mark.processes

STEPS = 8


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
    loss = Loss(at if world.rank == 1 else -1, how)
    step = step_of(world, nn.Linear(3, 1), loss, strategy, lr=0.01)
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


def rates(world: shoal.World, strategy: Any, how: str) -> tuple[int, float]:
    """How far the ranks have come, and at what rate they learn, after rank 1 has failed or skipped."""
    model = shoal.parallelize(nn.Linear(3, 1), world, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss = Loss(2 if world.rank == 1 and how != "overflows" else -1, how)
    precision = "fp16" if how == "overflows" else "fp32"
    step = shoal.Step(
        model,
        optimizer,
        shoal.Task(loss),
        precision=precision,
        schedule=schedule,
        schedule_interval="step",
    )
    for number, batch in enumerate(shoal.Loader((torch.ones(16, 3),), world, batch_size=4).epochs(1)):
        loss.steps = number
        if step._scale is not None:
            step._scale.value = 2.0**60 if number == 2 and world.rank == 1 else 1.0
        with suppress(ValueError, shoal.StepError):
            step(batch)
    return step.number, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("how", ["raises", "nan", "overflows"])
def test_the_schedule_of_who_fails_alone_is_that_of_the_others(how: str, two: Ranks) -> None:
    assert two.call(rates, shoal.LocalSGD(sync_every=3), how) == [(4, 2.0**-4)] * 2


@pytest.mark.parametrize(
    ("strategy", "at", "how"),
    [
        (shoal.LocalSGD(sync_every=3), 2, "nan"),
        (shoal.Hogwild(), 0, "raises"),
        pytest.param(shoal.Hogwild(max_staleness=0), 3, "nan", marks=pytest.mark.full),
        pytest.param(shoal.Hogwild(server=True), 3, "raises", marks=pytest.mark.full),
        pytest.param(shoal.LocalSGD(sync_every=3), 0, "raises", marks=pytest.mark.full),
        pytest.param(shoal.DiLoCo(sync_every=3), 5, "nan", marks=pytest.mark.full),
    ],
)
def test_who_fails_alone_goes_on_with_the_others(
    strategy: Any, at: int, how: str, two: Ranks, tmp_path: Path
) -> None:
    (nothing, *first), (told, *second) = two.call(go_on, strategy, at, how, tmp_path)
    assert nothing == []
    assert len(told) == 1
    assert ("a bad sample" if how == "raises" else "over this rank's local batch") in told[0]
    assert first == second == [STEPS, 6]
    verified = cli.shoal("checkpoint", "verify", str(tmp_path))
    assert verified.exit_code == 0, verified.output
