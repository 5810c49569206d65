"""The contents of a report as plain values, for `--json` and for the tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.tools.report import SHOWN, Attempt, BottleneckReport, History, Profile
from shoal.tools.report.attempts import describe_outcome, last_kept_steps, list_saves, list_splits
from shoal.tools.report.history import number_in
from shoal.util.clock import CLOCK


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


def summarize_run(history: History, verdict: BottleneckReport) -> dict[str, Any]:
    """Return all values behind the report, by name; durations in seconds."""
    found: dict[str, Any] = {
        "run": str(history.directory),
        "verdict": verdict.sentence,
        "efficient": verdict.efficient,
        "shares": dict(verdict.shares),
        "stragglers": [
            _named(each, "rank", "host", "part", "since", "until", "excess", "usual", "cost")
            for each in verdict.stragglers
        ],
        "findings": [_named(each, "text", "advice") for each in verdict.findings],
        "attempts": [
            _attempt(attempt, last, attempt is history.latest)
            for attempt, last in last_kept_steps(history)
        ],
        "splits": list_splits(history),
        "unreadable_lines": history.skipped,
    }
    if verdict.judged:
        newest = verdict.judged[-1]
        means = newest.profile
        rate = compute_rates(newest.attempt, means)
        found |= {
            "step_seconds": rate.step,
            "samples_per_second": rate.samples,
            "mfu": rate.mfu,
            "ranks": {str(rank): means.of_rank(rank) for rank in means.ranks},
            "parts": SHOWN,
        }
    return found


def _named(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _attempt(attempt: Attempt, last: int, latest: bool) -> dict[str, Any]:
    return {
        "began": attempt.began,
        "ranks": attempt.size,
        "missing": attempt.missing,
        "hosts": {attempt.host(rank) or "": None for rank in attempt.ranks},
        "first": attempt.first,
        "last": attempt.last,
        "done_again": attempt.last - last,
        "end": describe_outcome(attempt, last=latest, now=CLOCK.wall()),
        "saves": [_named(each, "step", "blocked", "seconds", "error") for each in list_saves(attempt)],
        "collectives": [
            {
                "rank": rank,
                "kind": kind,
                "group": group,
                "ranks": ranks,
                "backend": backend,
                **_named(sums, "calls", "bytes", "seconds", "algorithm", "bus", "exact"),
            }
            for (rank, (kind, group, ranks, backend)), sums in attempt.traffic.items()
        ],
    }
