"""The schedule of checks: their total time stays below the budget."""

from __future__ import annotations

import pytest

from shoal.training.guards.options import Guards, GuardTimes, steps_to_next_check
from shoal.util.errors import StepError


@pytest.mark.parametrize(("check", "step"), [(0.01, 0.1), (1.0, 0.05), (1e-5, 1.0)])
def test_checks_stay_below_the_budget(check: float, step: float) -> None:
    budget, spent, elapsed = 0.001, 0.0, 0.0
    for _ in range(20):
        times = GuardTimes(spent=spent, check=check, elapsed=elapsed, step=step)
        elapsed += steps_to_next_check(times, budget) * step
        spent += check
        assert spent <= budget * elapsed * (1 + 1e-9)
        elapsed += check


def test_a_check_that_costs_nothing_runs_on_every_step() -> None:
    times = GuardTimes(spent=0.0, check=0.0, elapsed=5.0, step=0.1)
    assert steps_to_next_check(times, 0.001) == 1


@pytest.mark.parametrize("budget", [0, -1, 1.5, float("nan"), "much"])
def test_a_budget_is_a_fraction(budget: float) -> None:
    with pytest.raises(StepError, match="fraction"):
        Guards(budget=budget)
