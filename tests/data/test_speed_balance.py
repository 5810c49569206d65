"""The rule that gives slower ranks fewer samples: simulated times, without processes or clocks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shoal.data.speed_balance import (
    LEAST_GAIN,
    WINDOWS,
    Shares,
    SpeedWindow,
    better_shares,
    equal_shares,
)

REST = 0.2
"""Seconds of each step that do not depend on samples."""

Times = Callable[[Shares], Sequence[float]]


def simulate(shares: Shares, times: Times, windows: int) -> list[Shares]:
    """Return the shares after each window in which `times` are measured."""
    held: deque[SpeedWindow] = deque(maxlen=WINDOWS)
    history = []
    for _ in range(windows):
        own = tuple(times(shares))
        held.append(SpeedWindow(own, max(own) + REST))
        found = better_shares(shares, list(held))
        if found is not None:
            assert found[1] >= LEAST_GAIN
            shares = found[0]
            held.clear()
        history.append(shares)
    return history


def linear(each: Sequence[float], fixed: Sequence[float] | None = None) -> Times:
    """Times of ranks with so many seconds per sample, and `fixed` ones."""
    fixed = fixed or [0.0] * len(each)
    return lambda shares: [a + b * n for a, b, n in zip(fixed, each, shares, strict=True)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((1, 2), (43, 21)), ((1, 1, 1, 3), (19, 19, 19, 7)), ((1, 0.01), (1, 63)), ((2, 2.1), (32, 32))],
)
def test_samples_are_in_proportion_to_speed(seconds: Sequence[float], expected: Shares) -> None:
    start = equal_shares(64, len(seconds))
    history = simulate(start, linear(seconds), 40)
    assert history[WINDOWS - 2] == start
    assert history[-1] == expected
    assert len({*history}) <= 2


def test_ranks_with_work_that_does_not_depend_on_samples_end_in_the_same_time() -> None:
    times = linear((0.1, 0.1, 0.3), (6.0, 0.0, 0.0))
    history = simulate(equal_shares(300, 3), times, 200)
    final = times(history[-1])
    assert max(final) / min(final) < 1.25
    assert history[-1] == history[-100]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_noise_on_equal_ranks_changes_nothing(ranks: int, seed: int) -> None:
    """Each window's time scatters by 20 %, and one in ten ranks takes three times as long."""
    random = np.random.default_rng(seed)
    start = equal_shares(64, ranks)

    def times(shares: Shares) -> list[float]:
        noise = random.lognormal(0.0, 0.2, ranks) * np.where(random.random(ranks) < 0.1, 3.0, 1.0)
        return [float(each) for each in noise * shares / 64]

    assert simulate(start, times, 2_000)[-1] == start


def test_a_rank_that_is_slow_now_and_then_changes_nothing() -> None:
    slow = itertools.cycle([True] * (WINDOWS - 1) + [False])
    start = equal_shares(64, 2)
    assert simulate(start, lambda _: [1.0, 3.0 if next(slow) else 1.0], 100)[-1] == start
