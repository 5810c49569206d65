"""The attempts of a run: how each ended, checkpoints, repeated steps, splits of batches, and speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from shoal.tools.report.breakdown import Profile
from shoal.tools.report.history import Array, Attempt, Event, History, integer_in, number_in, text_in
from shoal.util.units import duration

QUIET = 15.0
"""Seconds without an event after which a run is silent; longer if its steps take long."""
RECENT = 512
"""Number of recent steps from which the duration of a step is estimated."""
BINS = 240
"""Number of points of a curve."""


@dataclass(frozen=True)
class BinnedCurve:
    """A number over steps: its mean, minimum and maximum in each bin."""

    step: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class SaveRecord:
    """One save: how long it blocked the slowest rank, and how long it took on which rank."""

    step: int
    blocked: float
    seconds: float
    slowest: int
    ranks: int
    bytes: float
    error: str


@dataclass(frozen=True, kw_only=True)
class RecordedOutcome:
    """How an attempt ended, as its events record it: on which rank, at which step, when and why.

    `by` is a signal or another reason to stop, or, if `error` is set, the class of an error. Fields
    that the events lack are None or empty.
    """

    kind: Literal["ended", "preempted", "interrupted", "failed"]
    rank: int | None
    step: int | None
    time: float | None
    by: str = ""
    error: bool = False

    def reason(self, attempt: Attempt) -> str:
        """Return the cause, the rank and the step: `ValueError on rank 3 on node0, after step 50`."""
        after = f"after step {self.step:,}" if self.step is not None else ""
        if self.error:
            return ", ".join(filter(None, (f"{self.by} on {_place(attempt, self.rank)}", after)))
        by = f"by {self.by}" if self.by else ""
        on = f"on rank {self.rank}" if self.rank is not None and self.kind != "ended" else ""
        return " ".join(filter(None, (by, on, after)))


_ASKED: tuple[Literal["preempted", "interrupted", "failed"], ...] = (
    "preempted",
    "interrupted",
    "failed",
)
"""Events of a run that was asked to stop, or had to stop. Later events are only consequences."""
_WORDS = {"failed": "stopped"}


def outcome_of(attempt: Attempt) -> RecordedOutcome | None:
    """Return how an attempt ended; None if no event records an end.

    A request to stop takes precedence over errors. The earliest error counts, since others follow from
    it. An attempt without either has ended when its lowest rank has closed the run.
    """
    for _, event in attempt.events:
        for kind in _ASKED:
            if event["event"] == kind:
                return _outcome(kind, event, integer_in(event, "on"), by=text_in(event, "by"))
    ends = attempt.said("end")
    errors = [(rank, event) for rank, event in ends if event.get("reason") == "error"]
    if errors:
        rank, event = min(errors, key=lambda each: number_in(each[1], "t") or math.inf)
        return _outcome("failed", event, rank, by=text_in(event, "error") or "an error", error=True)
    lowest = min(attempt.ranks, default=None)
    closed = [(rank, event) for rank, event in ends if lowest in (None, rank)]
    return _outcome("ended", closed[-1][1], closed[-1][0]) if closed else None


def _outcome(
    kind: Literal["ended", "preempted", "interrupted", "failed"],
    event: Event,
    rank: int | None,
    *,
    by: str = "",
    error: bool = False,
) -> RecordedOutcome:
    step, time = integer_in(event, "step"), number_in(event, "t")
    return RecordedOutcome(kind=kind, rank=rank, step=step, time=time, by=by, error=error)


def describe_outcome(attempt: Attempt, *, last: bool, now: float) -> str:
    """Return in words how an attempt ended, or that it is running if it is the last one."""
    found = outcome_of(attempt)
    if found is not None and found.error:
        return found.reason(attempt)
    if found is not None and found.kind == "ended":
        return "ended"
    if found is not None:
        step = f"{found.step:,}" if found.step is not None else "?"
        where = _place(attempt, found.rank)
        words = _WORDS.get(found.kind, found.kind)
        return f"{words} by {found.by or 'a signal'} on {where}, saved at step {step}"
    if not last:
        return "killed or lost, without a final event"
    silence = max(0.0, now - attempt.seen)
    if silence <= silence_limit(attempt.ticks(min(attempt.ranks, default=0))[-RECENT:]["wall"]):
        return f"running, last event {duration(silence)} ago"
    return f"no event for {duration(silence)}: killed, lost or stuck"


def silence_limit(walls: Array) -> float:
    """Return the seconds without an event after which a run is silent, from recent step times."""
    return max(QUIET, 3 * float(walls.max(initial=0.0)))


def _place(attempt: Attempt, rank: int | None) -> str:
    return "a rank" if rank is None else attempt.place(rank)


def last_kept_steps(history: History) -> list[tuple[Attempt, int]]:
    """Return the attempts, each with its last step that no later attempt has repeated."""
    attempts = history.attempts
    return [
        (each, min(each.last, _until(attempts[place + 1 :], each.counting)))
        for place, each in enumerate(attempts)
    ]


def _until(later: Sequence[Attempt], name: str | None) -> int:
    """Return the last step of a Step before those that later attempts have taken."""
    begins = [begin for each in later if (begin := each.first_of(name)) is not None]
    return min(begins, default=1 << 62) - 1


def binned_curves(history: History, column: str) -> dict[str, BinnedCurve]:
    """Return a column of the first rank's steps, by name of the Step, without repeated steps."""
    pieces: dict[str, list[Array]] = {}
    attempts = history.attempts
    for place, attempt in enumerate(attempts):
        rank = min(attempt.ranks, default=0)
        for (owner, name), rows in attempt.steps.items():
            if owner == rank:
                kept = rows.all["step"] <= _until(attempts[place + 1 :], name)
                pieces.setdefault(name, []).append(rows.all[kept])
    found = {name: _curve(np.concatenate(each), column) for name, each in pieces.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _curve(rows: Array, column: str) -> BinnedCurve | None:
    rows = rows[np.isfinite(rows[column])]
    if not len(rows):
        return None
    steps, values = rows["step"], rows[column].astype(np.float64)
    bounds = _bounds(len(values))
    counts = np.diff([*bounds, len(values)])
    return BinnedCurve(
        steps[bounds],
        np.add.reduceat(values, bounds) / counts,
        np.minimum.reduceat(values, bounds),
        np.maximum.reduceat(values, bounds),
    )


def _bounds(count: int) -> Array:
    """Return where the bins of `count` values begin."""
    return np.unique(np.linspace(0, count, min(BINS, count) + 1).astype(int))[:-1]


def throughput_curve(history: History) -> BinnedCurve | None:
    """Return samples per second of all ranks over steps, without repeated steps."""
    pieces = []
    for attempt, last in last_kept_steps(history):
        ticks = attempt.ticks(min(attempt.ranks, default=0))
        pieces.append(ticks[(ticks["step"] <= last) & (ticks["wall"] > 0)])
    if not sum(map(len, pieces)):
        return None
    rows = np.concatenate(pieces)
    bounds = _bounds(len(rows))
    sizes, walls = (np.add.reduceat(rows[name].astype(np.float64), bounds) for name in ("size", "wall"))
    rate = sizes / walls
    return BinnedCurve(rows["step"][bounds], rate, rate, rate)


def list_saves(attempt: Attempt) -> list[SaveRecord]:
    """Return the saves of an attempt, in the order of their steps."""
    found: dict[int, dict[int, Event]] = {}
    errors: dict[int, str] = {}
    for rank, event in attempt.said("save"):
        if type(event.get("step")) is int:
            found.setdefault(event["step"], {})[rank] = event
    for _, event in attempt.said("save_failed"):
        if type(event.get("step")) is int:
            errors[event["step"]] = str(event.get("error", ""))
    listed = []
    for step in sorted({*found, *errors}):
        ranks = found.get(step, {})
        took = {rank: _positive(event, "seconds") for rank, event in ranks.items()}
        slowest = max(took, key=lambda rank: took[rank], default=0)
        listed.append(
            SaveRecord(
                step,
                blocked=max((_positive(event, "blocked") for event in ranks.values()), default=0.0),
                seconds=took.get(slowest, 0.0),
                slowest=slowest,
                ranks=len(ranks),
                bytes=sum(_positive(event, "bytes") for event in ranks.values()),
                error=errors.get(step, ""),
            )
        )
    return listed


def _positive(event: Event, name: str) -> float:
    return max(0.0, number_in(event, name) or 0.0)


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


@dataclass(frozen=True)
class StepRates:
    """The speed of the last attempt over its steady steps; None for what is not known."""

    step: float
    samples: float
    counted: float | None
    flops: float | None
    mfu: float | None
    peak: float | None
    peak_reason: str


def compute_rates(attempt: Attempt, found: Profile) -> StepRates:
    """Return seconds per step, samples per second, and the fraction of the device's peak FLOPS."""
    step = float(found.average(found.wall).mean())
    samples = float(found.average(found.samples)) / step if step > 0 else 0.0
    counts = found.counted[np.isfinite(found.counted)]
    counted = float(counts.mean()) / step if len(counts) and step > 0 else None
    said = attempt.said("flops")
    event: Mapping[str, Any] = said[0][1] if said else {}
    per_sample, peak = _per_sample(attempt), number_in(event, "peak") or 0.0
    # If a model is sharded over ranks, each computes a part of it.
    flops = per_sample * samples / max(1, attempt.size) if np.isfinite(per_sample) else None
    return StepRates(
        step,
        samples,
        counted,
        flops,
        flops / peak if flops is not None and peak > 0 else None,
        peak if peak > 0 else None,
        str(event.get("peak_reason", "")),
    )


def _per_sample(attempt: Attempt) -> float:
    """Return the FLOPs of all Steps per sample; a Step not taken on every batch counts for less."""
    rank = min(attempt.ranks, default=0)
    said = {
        event.get("name"): count
        for _, event in attempt.said("flops")
        if (count := number_in(event, "per_sample")) is not None
    }
    taken = {name: len(rows) for (owner, name), rows in attempt.steps.items() if owner == rank}
    ticks = max(taken.values(), default=0)
    each = [said.get(name, np.nan) * count / ticks for name, count in taken.items() if count]
    return sum(each) or np.nan
