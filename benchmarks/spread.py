"""Repeated measurements: where each begins and ends, and summaries by median and range."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import shoal
from shoal.util import accelerator


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some repeats, and the bounds of the others."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the lowest and the highest value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def quartiles(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles, for many rounds on a machine with other load."""
    if len(values) == 1:
        return spread(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)


def interval(values: Sequence[float]) -> Spread:
    """Return the median and its 95 % confidence interval by order statistics; for few, all values."""
    ordered, count = sorted(values), len(values)
    below = 0
    chance = 0.5**count
    while chance + math.comb(count, below + 1) * 0.5**count <= 0.025:
        below += 1
        chance += math.comb(count, below) * 0.5**count
    return Spread(
        median=statistics.median(ordered), low=ordered[below], high=ordered[count - 1 - below]
    )


def synchronize(world: shoal.World) -> None:
    """Wait for the devices of all ranks. Collective."""
    accelerator.synchronize(world.device)
    world.barrier()


def time_steps(step: Callable[[], None], steps: int, world: shoal.World) -> tuple[float, int]:
    """Return the mean seconds of a step, and the peak of memory in bytes. Collective.

    On CPUs, memory is that of the process since it began.
    """
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    synchronize(world)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(world)
    seconds = (time.perf_counter() - begun) / steps
    if cuda:
        return seconds, torch.cuda.max_memory_allocated()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
