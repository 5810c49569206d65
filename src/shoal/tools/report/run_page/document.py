"""The report of a run as a document: its sections and their order."""

from __future__ import annotations

from typing import Any

from shoal.tools.report import SHOWN, Attempt, BottleneckReport, History
from shoal.tools.report.attempts import (
    compute_rates,
    describe_outcome,
    last_kept_steps,
    list_saves,
    list_splits,
)
from shoal.tools.report.run_page import figures, tables
from shoal.util.clock import CLOCK, local_time
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Text
from shoal.util.units import counted, duration


def run_document(history: History, verdict: BottleneckReport) -> Document:
    """Return the report of a run in its current state."""
    latest, newest = history.latest, verdict.judged[-1] if verdict.judged else None
    facts = KeyNumbers(pairs=tables.key_facts(history, verdict), caption=f"Run {history.directory}")
    sections: list[tuple[str, list[DocumentBlock]]] = [
        ("At a glance", [*_findings(history, verdict), facts])
    ]
    if newest is not None:
        time = [
            *_warm_up(verdict),
            tables.parts_table(newest),
            figures.rank_figure(newest),
            figures.step_figure(verdict.judged),
            *tables.rank_tables(newest),
        ]
        sections += [
            ("Where the time goes", time),
            ("Stragglers", [tables.stragglers_table(verdict)]),
        ]
    sections += [
        ("Measured speed", [tables.splits_table(history)]),
        ("Loss and throughput", [*figures.progress_figures(history)]),
    ]
    if latest is not None:
        used = [*_speed(verdict), *figures.memory_figures(latest), tables.usage_table(latest)]
        sections += [
            ("Collectives", [tables.collectives_table(latest)]),
            ("Memory and power", used),
        ]
    sections += [
        ("Checkpoints", [tables.saves_table(history)]),
        ("Attempts", [tables.attempts_table(history, verdict)]),
    ]
    if latest is not None:
        sections += [
            ("Ranks and hosts", [tables.placement_table(latest)]),
            ("Configuration and versions", [tables.settings_table(latest)]),
        ]
    return Document(
        title=f"Run {history.directory}",
        verdict=verdict.sentence,
        sections=[Section(heading=name, blocks=blocks) for name, blocks in sections],
        values=summarize_run(history, verdict),
        about=f"shoal report, {local_time(CLOCK.wall(), '%Y-%m-%d %H:%M:%S')}. "
        f"From the events of {counted(history.files, 'rank')}.",
    )


def _findings(history: History, verdict: BottleneckReport) -> list[DocumentBlock]:
    found: list[DocumentBlock] = [Text(text=each.text, advice=each.advice) for each in verdict.findings]
    if verdict.judged and not found:
        found.append(
            Text(text="No problem found: no rank is slower than the others in any part.", only="page")
        )
    if history.skipped:
        found.append(Text(text=tables.describe_unreadable(history)))
    return found


def _warm_up(verdict: BottleneckReport) -> list[DocumentBlock]:
    one = verdict.judged[-1]
    if not one.warm_up:
        return []
    first = "The first step" if one.warm_up == 1 else f"The first {one.warm_up} steps"
    return [
        Text(
            text=f"{first} of the last attempt took {duration(one.warm_up_seconds)} (compilation, "
            "checks, cold caches), not included below.",
            only="page",
        )
    ]


def _speed(verdict: BottleneckReport) -> list[DocumentBlock]:
    text = tables.describe_speed(verdict.judged[-1]) if verdict.judged else ""
    return [Text(text=text, only="page")] if text else []


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
