"""What happened to a run besides its steps: attempts and how they ended, saves, what was done again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.report import Attempt, History
from shoal.report.history import Array
from shoal.util.units import duration

SILENCE = 60.0
"""Seconds without an event after which a run is not said to be running."""
BINS = 240
"""Points of a curve."""


@dataclass(frozen=True)
class BinnedCurve:
    """A number over steps: its mean, least and greatest value in each of some bins."""

    step: Array
    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Save:
    """One save: how long it kept the slowest rank waiting, and how long it took at which rank."""

    step: int
    blocked: float
    seconds: float
    slowest: int
    ranks: int
    bytes: float
    error: str


def ending(attempt: Attempt, *, last: bool, now: float) -> str:
    """How an attempt ended, as far as it has said so itself."""
    for kind, words in (
        ("failed", "stopped"),
        ("preempted", "preempted"),
        ("interrupted", "interrupted"),
    ):
        said = attempt.said(kind)
        if said:
            rank, event = said[0]
            on = event.get("on", rank)
            where = attempt.place(on) if type(on) is int else "a rank"
            return f"{words} by {event.get('by', 'a signal')} on {where}, saved at step {_step(event)}"
    errors = [(rank, event) for rank, event in attempt.said("end") if event.get("reason") == "error"]
    if errors:
        rank, event = min(errors, key=lambda each: number(each[1].get("t")))
        return f"{event.get('error', 'an error')} on {attempt.place(rank)}, after step {_step(event)}"
    if attempt.said("end"):
        return "ended"
    if not last:
        return "killed or lost, without a word"
    age = now - attempt.seen
    if age < SILENCE:
        return f"running, last sign {duration(max(0.0, age))} ago"
    return f"no sign for {duration(age)}: killed, lost or stuck"


def _step(event: Mapping[str, Any]) -> str:
    return f"{event['step']:,}" if type(event.get("step")) is int else "?"


def number(value: object) -> float:
    """A number of somebody's event, or NaN."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan


def kept(history: History) -> list[tuple[Attempt, int]]:
    """The attempts, each with the last of its steps that no later one has done again."""
    attempts = history.attempts
    return [
        (each, min(each.last, _until(attempts[place + 1 :], each.counting)))
        for place, each in enumerate(attempts)
    ]


def _until(later: Sequence[Attempt], name: str | None) -> int:
    """The last step of a Step's before those that later attempts have taken."""
    begins = [begin for each in later if (begin := each.first_of(name)) is not None]
    return min(begins, default=1 << 62) - 1


def curves(history: History, column: str) -> dict[str, BinnedCurve]:
    """A column of the first rank's steps by name of the Step, without what was done again."""
    pieces: dict[str, list[tuple[Array, Array]]] = {}
    attempts = history.attempts
    for place, attempt in enumerate(attempts):
        rank = min(attempt.ranks, default=0)
        for (owner, name), rows in attempt.steps.items():
            if owner == rank and len(rows):
                steps = rows.all["step"]
                chosen = steps <= _until(attempts[place + 1 :], name)
                pieces.setdefault(name, []).append((steps[chosen], rows.all[column][chosen]))
    found = {name: _curve(each) for name, each in pieces.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _curve(pieces: list[tuple[Array, Array]]) -> BinnedCurve | None:
    steps = np.concatenate([each[0] for each in pieces])
    values = np.concatenate([each[1] for each in pieces]).astype(np.float64)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(values):
        return None
    bounds = np.unique(np.linspace(0, len(values), min(BINS, len(values)) + 1).astype(int))[:-1]
    counts = np.diff([*bounds, len(values)])
    return BinnedCurve(
        steps[bounds],
        np.add.reduceat(values, bounds) / counts,
        np.minimum.reduceat(values, bounds),
        np.maximum.reduceat(values, bounds),
    )


def throughput(history: History) -> BinnedCurve | None:
    """Samples per second of the whole world over steps, without what was done again."""
    steps, sizes, walls = [], [], []
    for attempt, last in kept(history):
        rows = attempt.ticks(min(attempt.ranks, default=0))
        chosen = (rows["step"] <= last) & (rows["wall"] > 0)
        steps.append(rows["step"][chosen])
        sizes.append(rows["size"][chosen].astype(np.float64))
        walls.append(rows["wall"][chosen].astype(np.float64))
    if not sum(map(len, steps)):
        return None
    step, size, wall = (np.concatenate(each) for each in (steps, sizes, walls))
    bounds = np.unique(np.linspace(0, len(step), min(BINS, len(step)) + 1).astype(int))[:-1]
    rate = np.add.reduceat(size, bounds) / np.add.reduceat(wall, bounds)
    return BinnedCurve(step[bounds], rate, rate, rate)


def saves(attempt: Attempt) -> list[Save]:
    """The saves of an attempt, in the order of their steps."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
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
        took = {rank: _positive(event.get("seconds")) for rank, event in ranks.items()}
        slowest = max(took, key=lambda rank: took[rank], default=0)
        listed.append(
            Save(
                step,
                blocked=max((_positive(event.get("blocked")) for event in ranks.values()), default=0.0),
                seconds=took.get(slowest, 0.0),
                slowest=slowest,
                ranks=len(ranks),
                bytes=sum(_positive(event.get("bytes")) for event in ranks.values()),
                error=errors.get(step, ""),
            )
        )
    return listed


def _positive(value: object) -> float:
    found = number(value)
    return found if np.isfinite(found) and found > 0 else 0.0
