"""Checksums see any single flipped bit, the comparison of ranks the odd one; and when checks run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import shoal
from helpers.clocks import ManualClock
from shoal.training.guards.checksum_guard import sum_bits
from shoal.training.guards.options import Guards
from shoal.training.guards.schedule import CheckSchedule, GuardTimes, steps_to_next_check
from shoal.training.guards.votes import Verdict, differing_tensors
from shoal.util.errors import StepError

KINDS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_any_flipped_bit_changes_the_checksum(kind: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).to(kind)
    before = sum_bits({"x": tensor})["x"]
    memory = tensor.view(torch.uint8).numpy()
    for bit in range(8 * memory.size):
        mask = np.uint8(1 << bit % 8)
        memory[bit // 8] ^= mask
        assert sum_bits({"x": tensor})["x"] != before
        memory[bit // 8] ^= mask
    assert sum_bits({"x": tensor})["x"] == before


def test_checksums_of_views_scalars_and_empty_tensors() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": values.t(),
        "row": values[1, 1:],
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0),
    }
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    found = sum_bits(tensors)
    assert list(found) == list(tensors)
    assert found["none"] == 0
    assert sum_bits({n: c for n, c in copies.items() if n != "row"}).items() <= found.items()


def test_the_comparison_finds_the_odd_rank_of_a_majority() -> None:
    rows: list[
        tuple[list[tuple[int, ...]], list[dict[str, int]], tuple[str, tuple[int, ...], bool]]
    ] = [
        ([(0, 1, 2)], [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}], ("b", (2,), True)),
        ([(0, 1), (2, 3)], [{"a": 1}, {"a": 2}, {"a": 5}, {"a": 5}], ("a", (0, 1), False)),
        ([(0, 1, 2)], [{"a": 1}, {"a": 1}, {}], ("a", (2,), True)),  # a tensor that a rank lacks
    ]
    for groups, ranks, (name, odd, outvoted) in rows:
        expected = Verdict(ranks=odd, tensors=(name,), outvoted=outvoted)
        assert differing_tensors(groups, ranks) == [expected]


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
    with pytest.raises(StepError, match="above 0 and at most 1"):
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
