"""The curves of a whole run in little memory, however long it runs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .snapshot import Curve

POINTS = 512
"""How many points a curve has at most: more than a terminal has columns."""
HELD = 8 * POINTS

LOSS, KNOWN, SAMPLES, SECONDS = range(4)


class Tracks:
    """Loss and throughput by step: sums over stretches of steps, which grow longer with the run.

    Where an attempt goes on from an earlier step, what was there of later ones is forgotten.
    """

    def __init__(self) -> None:
        self._steps = np.empty(0, np.int64)
        self._sums = np.empty((4, 0))

    def add(
        self,
        steps: NDArray[np.int64],
        losses: NDArray[np.floating],
        samples: NDArray[np.number],
        seconds: NDArray[np.floating],
    ) -> None:
        """Steps that follow each other; a loss may be NaN."""
        if not len(steps):
            return
        kept = int(np.searchsorted(self._steps, steps[0]))
        known = np.isfinite(losses)
        sums = np.stack([np.where(known, losses, 0.0), known, samples, seconds]).astype(np.float64)
        self._steps = np.concatenate([self._steps[:kept], steps])
        self._sums = np.concatenate([self._sums[:, :kept], sums], axis=1)
        if len(self._steps) > HELD:
            self._steps, self._sums = self._stretches(POINTS)

    def loss(self) -> Curve | None:
        """The mean loss of each stretch; None before there is one."""
        return self._curve(LOSS, KNOWN)

    def throughput(self) -> Curve | None:
        """Samples per second of each stretch; None before there is one."""
        return self._curve(SAMPLES, SECONDS)

    def _curve(self, above: int, below: int) -> Curve | None:
        if not self._sums[below].any():
            return None
        ends, sums = self._stretches(POINTS)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(sums[below] > 0, sums[above] / sums[below], math.nan)
        return Curve(first=int(self._steps[0]), last=int(ends[-1]), values=tuple(values.tolist()))

    def _stretches(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The last step and the sums of so many equal stretches, fewer where there are fewer steps."""
        first, last = int(self._steps[0]), int(self._steps[-1])
        count = min(count, last - first + 1, len(self._steps))
        edges = np.linspace(first, last, count + 1)[1:]
        edges[-1] = last
        places = np.searchsorted(edges, self._steps)
        sums = np.stack([np.bincount(places, weights=each, minlength=count) for each in self._sums])
        return edges.astype(np.int64), sums.astype(np.float64)
