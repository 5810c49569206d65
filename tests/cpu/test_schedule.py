from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shoal.errors import StepError
from shoal.schedule import Schedule


def rates(schedule: Schedule, total: int, steps: int) -> list[float]:
    """The learning rates that an optimizer with a rate of 2 sees."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(shape="constant", warmup=4), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (Schedule(shape="linear", warmup=2), [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (Schedule(shape="linear", floor=0.5), [2.0, 2 - 1 / 6, 2 - 2 / 6, 1.5]),
        (Schedule(warmup=2), [1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
    ],
    ids=str,
)
def test_rates(schedule: Schedule, expected: list[float]) -> None:
    assert rates(schedule, 6, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_resumes_where_it_was() -> None:
    whole = rates(Schedule(warmup=3), 10, 10)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = Schedule(warmup=3)(optimizer, 10)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    state, saved = scheduler.state_dict(), optimizer.state_dict()
    again = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    resumed = Schedule(warmup=3)(again, 10)
    again.load_state_dict(saved)
    resumed.load_state_dict(state)
    for expected in whole[4:]:
        assert again.param_groups[0]["lr"] == expected
        again.step()
        resumed.step()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"shape": "cosin"}, "the shapes are cosine, linear, constant"),
        ({"warmup": -1}, "a warm-up is a number of steps"),
        ({"floor": 2.0}, "the floor a share of the rate"),
    ],
)
def test_schedules_that_can_not_be(options: dict[str, object], found: str) -> None:
    with pytest.raises(StepError, match=found):
        Schedule(**options)  # type: ignore[arg-type]
