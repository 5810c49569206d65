"""The check of a loss function: that it returns the sum over its samples, and not a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shoal.strategies.task import place
from shoal.util.errors import StepError

TOLERANCE = 0.02
"""Relative to the largest of the compared losses: the error of sums in half precision."""

EQUAL = 1e-3
"""Relative to the loss: the error of a sum that does not depend on other samples."""

LossSum: TypeAlias = tuple[float, float]
"""(loss sum, count) of some samples."""


def is_mean(whole: float, halves: tuple[LossSum, LossSum], samples: tuple[int, int]) -> bool:
    """Return whether `whole` is the mean of the losses of its halves and not their sum.

    A mean weighs halves by samples or by counts. False if that can't be known, as for losses that
    couple samples (contrastive ones), which are neither.
    """
    (first, first_count), (second, second_count) = halves
    tolerance = TOLERANCE * max(abs(whole), abs(first), abs(second))
    if not math.isfinite(tolerance) or abs(whole - (first + second)) <= tolerance:
        return False
    for one, other in (samples, (first_count, second_count)):
        total = one + other
        if total and abs(whole - (one * first + other * second) / total) <= tolerance:
            return True
    return False


def check_sums(
    loss: Callable[..., object], sums: Sequence[LossSum], samples: Sequence[int], *, alone: bool
) -> None:
    """Raise StepError if the first of the losses of a micro-batch and its halves is a mean.

    The micro-batch of a single sample (`alone`) has been tried together with another one.
    """
    (whole, _), first, second = sums
    if alone and first[1] == second[1] == 1:
        return  # the mean of one sample is its sum
    if is_mean(whole, (first, second), (samples[1], samples[2])):
        raise StepError(
            given=f"the loss function {place(loss)}: {whole:.6g} for {samples[0]} samples",
            found=f"its halves give {first[0]:.6g} and {second[0]:.6g}: it is a mean, not a sum",
            fix="use reduction='sum' in the loss function, with the number of samples as the "
            "count; if the model itself returns a mean, return output.loss * n, n",
        )


def counts_fit(sums: Sequence[LossSum]) -> bool:
    """Return whether the count of a micro-batch is the sum of those of its halves, or all are 1."""
    whole, first, second = (count for _, count in sums)
    return math.isclose(whole, first + second) or whole == first == second == 1


def add_up(sums: Sequence[LossSum]) -> bool:
    """Return whether the loss of a micro-batch, if it is known, is the sum of those of its halves."""
    return bool(sums) and math.isclose(sums[0][0], sums[1][0] + sums[2][0], rel_tol=EQUAL)
