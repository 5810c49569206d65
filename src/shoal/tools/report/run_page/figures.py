"""The figures of a report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.tools.report import LABELS, PALETTE, SHOWN, Attempt, AttemptProfile, History
from shoal.tools.report.attempts import BinnedCurve, binned_curves, throughput_curve
from shoal.tools.report.run_page.tables import ranks_to_show
from shoal.util.document import AreaPlot, BarPlot, Figure, LinePlot, Series

SHOWN_RANKS = 32
SHOWN_LINES = 8
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
