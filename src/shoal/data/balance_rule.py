"""The rule for the number of samples of each rank in a batch: pure functions of measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Shares: TypeAlias = tuple[int, ...]
"""The number of samples of each data-parallel rank in a batch of full size."""

WINDOWS = 8
"""Windows in a row that a change must have made faster."""
LEAST_GAIN = 1.1
"""Ratio by which it must have made each of them faster."""
MOST = 2
"""The largest multiple of an equal number of samples that a rank gets, since its memory is limited."""


@dataclass(frozen=True)
class SpeedWindow:
    """The mean time of some steps: `own` of each rank without its waits for others, and `step` in all.

    In seconds per step.
    """

    own: tuple[float, ...]
    step: float


@dataclass(frozen=True)
class ShareChange:
    """New numbers of samples from a position on.

    `gain` is the predicted ratio of step times before and after; None in a change that is replayed.
    """

    position: int
    shares: Shares
    gain: float | None = None


def equal_shares(size: int, ranks: int) -> Shares:
    """Return the numbers of samples of ranks of equal speed, as a Loader without measurement cuts."""
    return tuple((rank + 1) * size // ranks - rank * size // ranks for rank in range(ranks))


def better_shares(
    shares: Shares, windows: Sequence[SpeedWindow], *, least: int = 1
) -> tuple[Shares, float] | None:
    """Return better numbers of samples with their predicted gain, or None if they are good enough.

    Each rank gets samples in proportion to its speed, the median of the windows. They are better only
    if they would have made each of the last WINDOWS windows faster by LEAST_GAIN: noise slows another
    rank in another window. No rank gets fewer than `least` samples.
    """
    if len(windows) < WINDOWS:
        return None
    last = windows[-WINDOWS:]
    cost = [[own / max(1, n) for own, n in zip(each.own, shares, strict=True)] for each in last]
    speeds = [1 / max(1e-12, statistics.median(rank)) for rank in zip(*cost, strict=True)]
    found = _apportion(sum(shares), speeds, least)
    gains = [
        each.step / (each.step - max(each.own) + max(n * c for n, c in zip(found, costs, strict=True)))
        for each, costs in zip(last, cost, strict=True)
    ]
    if found == shares or min(gains) < LEAST_GAIN:
        return None
    return found, statistics.median(gains)


def _apportion(total: int, speeds: Sequence[float], least: int) -> Shares:
    """Split `total` in proportion to `speeds`, each part from `least` to MOST times an equal part."""
    ranks = len(speeds)
    most = max(least, MOST * total // ranks)
    parts = [total * speed / sum(speeds) for speed in speeds]
    found = [min(most, max(least, int(part))) for part in parts]
    while (rest := total - sum(found)) != 0:
        one = 1 if rest > 0 else -1
        free = [r for r in range(ranks) if least <= found[r] + one <= most]
        if not free:
            break
        nearest = max(free, key=lambda r: (one * (parts[r] - found[r]), r))
        found[nearest] += one
    return tuple(found)
