"""The report of a run as a document: its sections and their order, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.tools.report import (
    LABELS,
    PALETTE,
    SHOWN,
    Attempt,
    AttemptProfile,
    BottleneckReport,
    History,
)
from shoal.tools.report.attempts import (
    BinnedCurve,
    binned_curves,
    compute_rates,
    describe_outcome,
    last_kept_steps,
    list_saves,
    list_splits,
    throughput_curve,
)
from shoal.tools.report.experts import expert_loads
from shoal.tools.report.run_page import tables
from shoal.tools.report.run_page.tables import ranks_to_show
from shoal.util.clock import CLOCK, local_time
from shoal.util.document import (
    AreaPlot,
    BarPlot,
    Document,
    DocumentBlock,
    Figure,
    KeyNumbers,
    LinePlot,
    Section,
    Series,
    Text,
)
from shoal.util.units import counted, duration

SHOWN_RANKS = 32
SHOWN_LINES = 8
_EXPERTS = (
    "layer",
    "step",
    "tokens",
    "dropped",
    "imbalance",
    "busiest",
    "idle",
    "effective",
    "collapsed",
)
FILLS = {LABELS[part]: (paint.colour, paint.hatch) for part, paint in PALETTE.items()}


def rank_figure(one: AttemptProfile) -> Figure:
    """Return the figure of a step with a bar for each rank."""
    ranks = ranks_to_show(one, SHOWN_RANKS)
    times = {rank: one.profile.of_rank(rank) for rank in ranks}
    there = [part for part in SHOWN if any(each[part] > 0 for each in times.values())]
    unit, scale = _unit(max(sum(each.values()) for each in times.values()))
    values = {LABELS[part]: [max(0.0, times[rank][part]) / scale for rank in ranks] for part in there}
    return Figure(
        name="step-by-rank",
        caption="Mean step of each rank, by part."
        if len(ranks) == len(one.profile.ranks)
        else f"Mean step, by part, of the {len(ranks)} ranks that waited least for others.",
        drawing=BarPlot(
            labels=[_short(one.attempt, rank) for rank in ranks],
            parts=values,
            x=f"{unit} per step",
            of="rank",
            fills=FILLS,
        ),
    )


def step_figure(judged: list[AttemptProfile]) -> Figure:
    """Return the figure of step time over steps, mean of the ranks; of repeated steps the last."""
    steps: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for one in judged:
        steps = {step: means for step, means in steps.items() if step < int(one.profile.first[0])}
        means = one.profile.mean.mean(axis=1)
        steps |= {int(step): means[:, place] for place, step in enumerate(one.profile.first)}
    xs = sorted(steps)
    table = np.stack([steps[step] for step in xs], axis=1)
    unit, scale = _unit(float(table.sum(axis=0).max()))
    there = [part for part, row in zip(SHOWN, table, strict=True) if row.max() > 0]
    values = {
        LABELS[part]: (np.maximum(table[SHOWN.index(part)], 0) / scale).tolist() for part in there
    }
    return Figure(
        name="step-over-time",
        caption="Step time over the run, by part, mean of the ranks.",
        drawing=AreaPlot(xs=xs, parts=values, x="from step", y=f"{unit} per step", fills=FILLS),
    )


def progress_figures(history: History) -> Iterator[Figure]:
    """Yield the figures of loss and throughput."""
    losses = binned_curves(history, "loss")
    if losses:
        yield _curves("loss", "Loss of the global batch, with minimum and maximum.", "loss", losses)
    rate = throughput_curve(history)
    if rate is not None:
        yield _curves(
            "throughput",
            "Samples per second, of all ranks together.",
            "samples per second",
            {"samples per second": rate},
            zero=True,
        )


def _curves(
    name: str, caption: str, y: str, found: dict[str, BinnedCurve], *, zero: bool = False
) -> Figure:
    # A single Step needs no name.
    named = dict(zip([y], found.values(), strict=True)) if len(found) == 1 else found
    series = [
        Series(
            label=label,
            x=each.step.tolist(),
            y=each.mean.tolist(),
            low=each.low.tolist(),
            high=each.high.tolist(),
        )
        for label, each in list(named.items())[:SHOWN_LINES]
    ]
    return Figure(name=name, caption=caption, drawing=LinePlot(series=series, x="step", y=y, zero=zero))


def memory_figures(attempt: Attempt) -> Iterator[Figure]:
    """Yield memory over time: of the devices if there are any, else of the processes."""
    found = {}
    for rank, held in sorted(attempt.usage.items()):
        seen = held.all
        device = np.isfinite(seen["device_memory"])
        values = np.where(device, seen["device_memory"], seen["rss"])
        good = np.isfinite(values) & np.isfinite(seen["time"])
        if good.any():
            minutes = (seen["time"][good] - attempt.began) / 60
            found[rank] = (minutes, values[good] / 1e9)
    if not found:
        return
    largest = sorted(found, key=lambda rank: -float(found[rank][1].max()))[:SHOWN_LINES]
    of = "" if len(largest) == len(found) else f", the {len(largest)} ranks with most of it"
    series = []
    for rank in sorted(largest):
        xs, ys = found[rank]
        stride = max(1, len(xs) // 200)
        series.append(
            Series(label=_short(attempt, rank), x=xs[::stride].tolist(), y=ys[::stride].tolist())
        )
    yield Figure(
        name="memory",
        caption=f"Memory of the last attempt{of}.",
        drawing=LinePlot(series=series, x="minutes since the start", y="GB", zero=True),
    )


def _short(attempt: Attempt, rank: int) -> str:
    host = attempt.host(rank)
    return f"{rank}" if host is None else f"{rank} {host.partition('.')[0][:14]}"


def _unit(seconds: float) -> tuple[str, float]:
    return ("seconds", 1.0) if seconds >= 1 else ("milliseconds", 1e-3)


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
            rank_figure(newest),
            step_figure(verdict.judged),
            *tables.rank_tables(newest),
        ]
        sections += [
            ("Where the time goes", time),
            ("Stragglers", [tables.stragglers_table(verdict)]),
        ]
    sections += [
        ("Measured speed", [tables.splits_table(history)]),
        ("Loss and throughput", [*progress_figures(history)]),
    ]
    if latest is not None:
        text = "" if newest is None else tables.describe_speed(newest)
        speed = [Text(text=text, only="page")] if text else []
        used = [*speed, *memory_figures(latest), tables.usage_table(latest)]
        sections += [
            ("Mixtures of experts", [tables.experts_table(history)]),
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
        "experts": [_named(each, *_EXPERTS) for each in expert_loads(history)],
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
