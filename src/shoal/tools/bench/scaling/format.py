"""Formatted figures, the same in the terminal, on the page and in CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from shoal.tools.bench.scaling.aggregate import ScalingPoint, Spread
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.tools.bench.scaling.job_summary import PARTS
from shoal.tools.bench.scaling.subject import Subject, throughput_unit
from shoal.util.document import Table
from shoal.util.grouping import group_by
from shoal.util.units import three_digits


def curve_tables(
    rows: Sequence[ScalingPoint], model: str, unit: str, each: int, *, only: Literal["terminal", "page"]
) -> list[Table]:
    """Return a table of each curve; `each` is the units per sample. A page has space for ranges."""
    way = format_range if only == "page" else format_spread
    head = ("n", "batch", f"{unit}/s", "ms/step", "sync ms", "speed-up", "eff. %", "runs")
    return [
        Table(
            caption=f"{model}: {curve}",
            head=head,
            rows=[curve_cells(row, each, way) for row in own],
            right=head,
            only=only,
        )
        for curve, own in group_by(rows, lambda row: row.curve).items()
    ]


def curve_cells(row: ScalingPoint, each: int, way: Callable[[Spread, float], str]) -> tuple[str, ...]:
    """Return a row of a curve's table; `way` formats the spread."""
    begin = (str(row.processes), f"{row.configuration.batch:,}")
    if not (row.rate and row.iteration and row.speedup and row.efficiency):
        return (*begin, "failed", "", "", "", "", f"0 of {row.failed}")
    return (
        *begin,
        way(row.rate, each),
        way(row.iteration, 1e3),
        three_digits(row.synchronisation * 1e3),
        way(row.speedup, 1),
        way(row.efficiency, 100),
        f"{row.repeats} of {row.repeats + row.failed}" if row.failed else f"{row.repeats}",
    )


def format_range(value: Spread, scale: float) -> str:
    """Return the median with the lowest and the highest value."""
    low, middle, high = (three_digits(each * scale) for each in (value.low, value.median, value.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def format_spread(value: Spread, scale: float) -> str:
    """Return the median, and half of the range in percent of it."""
    middle = three_digits(value.median * scale)
    if value.low == value.high or not value.median:
        return middle
    return f"{middle} ±{(value.high - value.low) / 2 / value.median * 100:.0f}%"


def comparison_tables(
    rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str], unit: str, each: int
) -> list[Table]:
    """Return tables of processes by curves of one scaling, such as backends: throughput, step time.

    Return none for a single curve, whose own table has the same figures.
    """
    curves = list(dict.fromkeys(row.curve for row in rows))
    if len(curves) < 2:
        return []
    head = ("n", *(names[curve] for curve in curves))
    sizes = sorted({row.processes for row in rows})
    found = []
    for figure, cell in (
        (f"{unit}/s (speed-up)", lambda row: _rated(row, each)),
        ("ms/step (synchronization)", _timed),
    ):
        cells = {(row.processes, row.curve): cell(row) for row in rows}
        lines = [(str(n), *(cells.get((n, curve), "") for curve in curves)) for n in sizes]
        caption = f"{curves[0].scaling} scaling: {figure}"
        found.append(Table(caption=caption, head=head, rows=lines, right=head))
    return found


def _rated(row: ScalingPoint, each: int) -> str:
    if row.rate is None or row.speedup is None:
        return ""
    return f"{three_digits(row.rate.median * each)} ({row.speedup.median:.2f}x)"


def _timed(row: ScalingPoint) -> str:
    return f"{three_digits(row.mean * 1e3)} ({three_digits(row.synchronisation * 1e3)})"


def csv_rows(subject: Subject, rows: Sequence[ScalingPoint]) -> list[dict[str, object]]:
    """Return all rows: medians with low and high, rates in units per second, times in seconds."""
    unit, each = throughput_unit(subject)
    found = []
    for row in rows:
        values = {**asdict(row.curve), "processes": row.processes, "batch": row.configuration.batch}
        for name, spread, scale in (
            (f"{unit}_per_second", row.rate, each),
            ("iteration", row.iteration, 1),
            ("speedup", row.speedup, 1),
            ("efficiency", row.efficiency, 1),
        ):
            for ending, bound in (("", "median"), ("_low", "low"), ("_high", "high")):
                values[name + ending] = f"{getattr(spread, bound) * scale:.6g}" if spread else ""
        parts = {"synchronisation": row.synchronisation, **row.parts} if row.parts else {}
        for part in ("synchronisation", *PARTS):
            values[part] = f"{parts[part]:.6g}" if part in parts else ""
        rest = {"repeats": row.repeats, "failed": row.failed, "reason": row.reason or ""}
        found.append({**values, **rest, "notes": "; ".join(row.notes)})
    return found
