"""The schedule of checks: their total time stays below the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shoal
from helpers.clocks import ManualClock
from shoal.training.guards.options import Guards, GuardTimes, steps_to_next_check
from shoal.training.guards.schedule import CheckSchedule
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


def test_a_schedule_counts_the_time_of_its_checks(world: shoal.World) -> None:
    clock = ManualClock()
    schedule = CheckSchedule(world, budget=0.01, step=0, clock=clock)
    for _ in range(2):
        clock.sleep(1.0)
        schedule.count_step()
    assert [schedule.is_due(step) for step in (1, 2)] == [False, True]
    schedule.begin()
    with schedule.spending():
        clock.sleep(0.1)
    times = schedule.times()
    assert (times.spent, times.check, times.elapsed, times.step) == pytest.approx((0.1, 0.1, 2.1, 1.0))
    schedule.plan(2, [times], more=0.4)
    planned = replace(times, spent=0.5, check=0.5)
    assert schedule.due == 2 + steps_to_next_check(planned, 0.01)
    assert schedule.summary() == pytest.approx({"checks": 1, "seconds": 0.5, "of": 2.1})
