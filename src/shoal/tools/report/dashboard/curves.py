"""The curves of a complete run in constant memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.tools.report.dashboard.snapshot import MetricCurve

POINTS = 1024
"""Maximum number of points of a curve: half of it is more than a terminal has columns."""

LOSS, KNOWN, SAMPLES, SECONDS = range(4)
LAST = 1 << 62


class Tracks:
    """Loss and throughput by step: sums over intervals of equal length, which doubles when needed.

    If an attempt resumes from an earlier step, the sums of later intervals are dropped.
    """

    def __init__(self) -> None:
        self._first, self._last = 0, 0
        self._length = 1
        self._sums = np.zeros((4, 0))

    def add(
        self,
        steps: NDArray[np.int64],
        losses: NDArray[np.floating],
        samples: NDArray[np.number],
        seconds: NDArray[np.floating],
    ) -> None:
        """Add consecutive steps; a loss may be NaN."""
        if not len(steps) or steps.min() < 0 or steps.max() > LAST:
            return
        begin, self._last = int(steps.min()), int(steps.max())
        if begin < self._first or not self._sums.size:
            self._first, self._length, self._sums = begin, 1, np.zeros((4, 0))
        while (self._last - self._first) // self._length >= POINTS:
            self._double()
        kept = -((self._first - begin) // self._length)  # keep the interval in which they begin
        count = (self._last - self._first) // self._length + 1
        sums = np.zeros((4, count))
        kept = min(kept, count, self._sums.shape[1])
        sums[:, :kept] = self._sums[:, :kept]
        known = np.isfinite(losses)
        places = (steps - self._first) // self._length
        for row, values in enumerate((np.where(known, losses, 0.0), known, samples, seconds)):
            sums[row] += np.bincount(places, weights=values, minlength=count)
        self._sums = sums

    def loss(self, now: float | None = None) -> MetricCurve | None:
        """Return the mean loss of each interval, and its current value; None before there is one."""
        return self._curve(LOSS, KNOWN, now)

    def throughput(self, now: float | None = None) -> MetricCurve | None:
        """Return the same for samples per second."""
        return self._curve(SAMPLES, SECONDS, now)

    def _curve(self, above: int, below: int, now: float | None) -> MetricCurve | None:
        if not self._sums[below].any():
            return None
        values = np.full(self._sums.shape[1], math.nan)
        np.divide(self._sums[above], self._sums[below], out=values, where=self._sums[below] > 0)
        weights = tuple(self._sums[below].tolist())
        return MetricCurve(
            first=self._first, last=self._last, values=tuple(values.tolist()), weights=weights, now=now
        )

    def _double(self) -> None:
        even = self._sums.shape[1] % 2
        pairs = np.pad(self._sums, ((0, 0), (0, even))).reshape(4, -1, 2)
        self._sums, self._length = pairs.sum(axis=2), 2 * self._length
