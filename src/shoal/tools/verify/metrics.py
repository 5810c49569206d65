"""Comparison of the metrics that evaluations reduce over different numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.tools.verify.observations import ReducedMetric, RunRecord
from shoal.tools.verify.operations import ROUNDING

Parts = Sequence[ReducedMetric]
"""The parts of one metric on all ranks."""


class DifferingMetric(NamedTuple):
    """The steps before a metric that differs, its line, and its two values."""

    step: int
    line: str
    values: str


def first_metric(a: RunRecord, b: RunRecord, again: RunRecord) -> DifferingMetric | None:
    """Return the first metric that is another one on the ranks of `b` than on those of `a`.

    Its parts are the same in the repetition `again`, and the model's outputs over all ranks are those
    of `a`, but neither the sum nor the mean of its parts is.
    """
    for left, right, same in zip(*(_by_metric(run) for run in (a, b, again)), strict=False):
        places = {(part.step, part.line) for part in (*left, *right, *same)}
        # The time, for one, differs in each run.
        if len(places) > 1 or [p.values for p in right] != [p.values for p in same]:
            continue
        values = _differing_values(left, right) if _have_equal_outputs(left, right) else None
        if values is not None:
            step, line = places.pop()
            found = f"{values[0]:.6g} on {a.name} and {values[1]:.6g} on {b.name} on average"
            return DifferingMetric(step, line, found)
    return None


def _by_metric(run: RunRecord) -> list[Parts]:
    return list(zip(*(rank.metrics for rank in run.ranks), strict=False))


def _have_equal_outputs(left: Parts, right: Parts) -> bool:
    """Return whether the ranks have the outputs of the same samples, up to rounding."""
    sides = [[part.outputs for part in side] for side in (left, right)]
    x, y = ([sum(each) for each in zip(*side, strict=True)] for side in sides)
    count, total, squares, *discrete = x
    return (
        [count, *discrete] == [y[0], *y[3:]]
        and abs(total - y[1]) <= ROUNDING * math.sqrt(count * squares)
        and abs(squares - y[2]) <= ROUNDING * squares
    )


def _differing_values(left: Parts, right: Parts) -> tuple[float, float] | None:
    """Return the means over ranks of the first element that the ranks do not add up or average."""
    columns = (list(zip(*(part.values for part in side), strict=False)) for side in (left, right))
    for x, y in zip(*columns, strict=False):
        if all(value.is_integer() for value in (*x, *y)):
            continue  # counts are of batches and padded tokens, too
        means = sum(x) / len(x), sum(y) / len(y)
        limit = ROUNDING * max(map(abs, (*x, *y)))
        if abs(means[0] - means[1]) > limit and abs(sum(x) - sum(y)) > limit:
            return means
    return None
