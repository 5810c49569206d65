from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shoal.training.schedule import LRSchedule
from shoal.util.errors import StepError


def rates(schedule: LRSchedule, total: int, steps: int) -> list[float]:
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
        (LRSchedule(decay="constant", warmup_steps=4), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        (LRSchedule(decay="linear", warmup_steps=2), [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (LRSchedule(decay="linear", min_ratio=0.5), [2.0, 2 - 1 / 6, 2 - 2 / 6, 1.5]),
        (LRSchedule(decay="constant", warmup_ratio=0.5), [2 / 3, 4 / 3, 2.0, 2.0]),
        (LRSchedule(decay="constant", warmup_ratio=0.4), [2 / 3, 4 / 3, 2.0, 2.0]),  # 2.4 steps
        (LRSchedule(warmup_steps=2), [1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
    ],
    ids=str,
)
def test_rates(schedule: LRSchedule, expected: list[float]) -> None:
    assert rates(schedule, 6, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_a_schedule_resumes_where_it_was() -> None:
    made = []
    for _ in range(2):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        made.append((optimizer, LRSchedule(warmup_steps=3)(optimizer, 10)))
    (optimizer, scheduler), (again, resumed) = made
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for expected in rates(LRSchedule(warmup_steps=3), 10, 10)[4:]:
        assert again.param_groups[0]["lr"] == expected
        again.step()
        resumed.step()


STEPS, RATIO = "warmup_steps is a number of optimizer steps", "warmup_ratio is a fraction of all"


def test_schedules_that_can_not_be() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"decay": "cosin"}, "decay is one of 'cosine', 'linear', 'constant'"),
        *(({"warmup_steps": steps}, STEPS) for steps in (-1, 2.5, True, "10", 0.1)),
        *(({"warmup_ratio": ratio}, RATIO) for ratio in (10, -0.1, float("nan"))),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "both give the length of the warm-up"),
        ({"min_ratio": 2.0}, "min_ratio is a fraction of the learning rate"),
        ({"min_ratio": "0.1"}, "min_ratio is a fraction of the learning rate"),
    ]
    for options, found in rows:
        with pytest.raises(StepError, match=found) as caught:
            LRSchedule(**options)
        if options == {"warmup_steps": 0.1}:
            assert "Schedule(warmup_ratio=0.1)" in caught.value.fix


def test_the_steps_of_a_ratio_are_rounded_up() -> None:
    for ratio, total, steps in ((0.07, 100, 7), (0.1, 3, 1), (1.0, 5, 5)):
        schedule = LRSchedule(decay="constant", warmup_ratio=ratio)
        factors = [schedule.factor(step, total) for step in range(steps)]
        assert factors == [(step + 1) / steps for step in range(steps)], ratio
