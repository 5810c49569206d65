"""The check of a loss function: that it returns the sum over its samples, regardless of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from shoal.strategies.task import place
from shoal.util.errors import StepError

TOLERANCE = 0.02
"""Relative to the largest of the compared losses: the error of sums in half precision."""

EQUAL = 1e-3
"""Relative to the loss: the error of a sum that does not depend on other samples."""

LossSum: TypeAlias = tuple[float, float]
"""(loss sum, count) of some samples."""


class NotSum(NamedTuple):
    """The losses of a micro-batch and its halves, which do not add up.

    `term` is a part of the loss that does not depend on the samples; None if it is not the reason.
    """

    sums: Sequence[LossSum]
    samples: int
    term: float | None = None

    def error(self, loss: Callable[..., object]) -> StepError:
        """Return the error for a batch that is split."""
        (whole, count), (first, first_count), (second, second_count) = self.sums
        counts = f" and counts of {first_count:g} and {second_count:g}" if excess(self.sums)[1] else ""
        return StepError(
            given=f"the loss function {place(loss)}: {whole:.6g}"
            + (f" and a count of {count:g}" if counts else "")
            + f" for {self.samples} samples",
            found=f"its halves give {first:.6g} and {second:.6g}{counts}, which do not add up: results "
            "depend on the number of processes",
            fix="use len(output) in place of the size of the global batch; if the loss of a sample "
            "depends on others, compute it from shoal.gather(output), or accept the difference with "
            "shoal.Task(…, depends_on_batch=True)",
        )

    def line(self, loss: Callable[..., object], *, splits: bool) -> str:
        """Return what is printed if nothing is split, or for a term without samples."""
        if self.term is None:
            error = self.error(loss)
            return f"{error.given}; {error.found}"
        if not splits:
            return ""
        return (
            f"the loss function {place(loss)} adds {self.term:.6g} in each micro-batch, regardless of "
            "its samples; multiply it by the count to add it once to the loss of the step"
        )


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


def is_sum(sums: Sequence[LossSum], tolerance: float) -> bool:
    """Return whether loss and count of a micro-batch are the sums of those of its halves.

    True if the losses are not finite.
    """
    scale = max(abs(loss) for loss, _ in sums)
    loss, count = excess(sums)
    counts = sum(count for _, count in sums[1:])
    return not math.isfinite(scale) or (
        abs(loss) <= tolerance * scale and abs(count) <= EQUAL * abs(counts)
    )


def excess(sums: Sequence[LossSum]) -> LossSum:
    """Return by how much the losses of the parts of a micro-batch exceed its own."""
    (whole, count), (first, first_count), (second, second_count) = sums
    return first + second - whole, first_count + second_count - count


def counts_fit(sums: Sequence[LossSum]) -> bool:
    """Return whether the count of a micro-batch is the sum of those of its halves, or all are 1."""
    whole, first, second = (count for _, count in sums)
    return math.isclose(whole, first + second) or whole == first == second == 1


def add_up(sums: Sequence[LossSum]) -> bool:
    """Return whether the loss of a micro-batch, if it is known, is the sum of those of its halves."""
    return bool(sums) and math.isclose(sums[0][0], sums[1][0] + sums[2][0], rel_tol=EQUAL)
