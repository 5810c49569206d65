"""How a run split its batches by measured speed, and what that gained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.tools.report.event_fields import integer_in, number_in
from shoal.tools.report.history import Attempt, Event, History


@dataclass(frozen=True)
class MeasuredSplit:
    """The numbers of samples of the ranks from a step on, and the speed of the run with them.

    `predicted` and `gained` are ratios: the predicted one of the step times before and after, and the
    measured one of the speed to that with equal numbers. Values that are not known are None.
    """

    attempt: float
    step: int
    samples: tuple[int, ...]
    predicted: float | None
    speed: float | None
    gained: float | None = None


def list_splits(history: History) -> list[MeasuredSplit]:
    """Return how all attempts split their batches; empty for runs that did not measure speed."""
    found: list[MeasuredSplit] = []
    equal: float | None = None
    for attempt in history.attempts:
        rank = min(attempt.ranks, default=0)
        said = [(attempt.first, attempt.starts.get(rank, {}))]
        said += [(integer_in(event, "step") or 0, event) for _, event in attempt.said("shares")]
        begins = [(step, event) for step, event in said if _samples_in(event)]
        ends = [step for step, _ in begins[1:]] + [attempt.last + 1]
        for (step, event), end in zip(begins, ends, strict=False):
            samples, speed = _samples_in(event), _speed(attempt, rank, step, end)
            if equal is None and max(samples) - min(samples) <= 1:
                equal = speed
            gained = speed / equal if speed and equal else None
            predicted = number_in(event, "predicted")
            found.append(MeasuredSplit(attempt.began, step, samples, predicted, speed, gained))
    return found


def has_changed(splits: list[MeasuredSplit]) -> bool:
    """Return whether the numbers of samples have changed during the run."""
    return any(one.samples != other.samples for one, other in pairwise(splits))


def _samples_in(event: Event | Mapping[str, object]) -> tuple[int, ...]:
    samples = event.get("samples")
    return tuple(n for n in samples if type(n) is int) if isinstance(samples, list) else ()


def _speed(attempt: Attempt, rank: int, begin: int, end: int) -> float | None:
    """Return the median samples per second of the steps [begin, end), without saves and evaluation."""
    ticks = attempt.ticks(rank)
    rows = ticks[(ticks["step"] >= begin) & (ticks["step"] < end)]
    seconds = rows["wall"] - rows["checkpoint"] - rows["evaluation"]
    rates = rows["size"][seconds > 0] / seconds[seconds > 0]
    return float(np.median(rates)) if len(rates) else None
