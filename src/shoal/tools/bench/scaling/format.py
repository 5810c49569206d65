"""Formatted figures, the same in the terminal, on the page and in CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.tools.bench.scaling.aggregate import ScalingPoint, Spread
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.tools.bench.scaling.job_summary import PARTS
from shoal.util.document import Table
from shoal.util.units import three_digits

ChosenInterface = Callable[[Spread, float], str]


def curve_headers(unit: str) -> tuple[str, ...]:
    """Return the columns of a curve's table."""
    return ("n", "batch", f"{unit}/s", "ms/step", "sync ms", "speed-up", "eff. %", "runs")


def curve_cells(row: ScalingPoint, each: int, way: ChosenInterface) -> tuple[str, ...]:
    """Return a row of a curve's table; `each` is the units per sample, `way` formats the spread."""
    begin = (str(row.processes), f"{row.configuration.batch:,}")
    if not (row.rate and row.iteration and row.speedup and row.efficiency):
        return (*begin, "failed", "", "", "", "", f"0 of {row.failed}")
    many = f"{row.repeats} of {row.repeats + row.failed}" if row.failed else f"{row.repeats}"
    return (
        *begin,
        way(row.rate, each),
        way(row.iteration, 1e3),
        three_digits(row.synchronisation * 1e3),
        way(row.speedup, 1),
        way(row.efficiency, 100),
        many,
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
    """Return tables of processes by curves, such as backends: throughput, then step time.

    Return None for a single curve, whose own table has the same figures.
    """
    curves = list(dict.fromkeys(row.curve for row in rows))
    if len(curves) < 2:
        return []
    known = {(row.processes, row.curve): row for row in rows if row.rate is not None}
    scaling = curves[0].scaling
    head = ("n", *(names[curve] for curve in curves))
    found = []
    for caption, cell in (
        (f"{scaling} scaling: {unit}/s (speed-up)", lambda row: _rated(row, each)),
        (f"{scaling} scaling: ms/step (synchronization)", _timed),
    ):
        lines = []
        for size in sorted({size for size, _ in known}):
            own = [known.get((size, curve)) for curve in curves]
            lines.append((str(size), *("" if row is None else cell(row) for row in own)))
        found.append(Table(caption=caption, head=head, rows=lines, right=head))
    return found


def _rated(row: ScalingPoint, each: int) -> str:
    if row.rate is None or row.speedup is None:
        return ""
    return f"{three_digits(row.rate.median * each)} ({row.speedup.median:.2f}x)"


def _timed(row: ScalingPoint) -> str:
    return f"{three_digits(row.mean * 1e3)} ({three_digits(row.synchronisation * 1e3)})"


FIELDS = ("scaling", "backend", "strategy", "precision", "way")
SPREADS = ("rate", "iteration", "speedup", "efficiency")


def csv_table(rows: Sequence[ScalingPoint], unit: str, each: int) -> Table:
    """Return all rows: medians with low and high, rates in `unit` per second, times in seconds."""
    spreads = [name if name != "rate" else f"{unit}_per_second" for name in SPREADS]
    ranges = [f"{name}{end}" for name in spreads for end in ("", "_low", "_high")]
    rest = ("synchronisation", *PARTS, "repeats", "failed", "reason", "notes")
    head = (*FIELDS, "processes", "batch", *ranges, *rest)
    return Table(caption="", head=head, rows=[_values(row, each) for row in rows])


def _values(row: ScalingPoint, each: int) -> list[str]:
    values = [getattr(row.curve, name) for name in FIELDS]
    values += [str(row.processes), str(row.configuration.batch)]
    for name in SPREADS:
        found: Spread | None = getattr(row, name)
        scale = each if name == "rate" else 1
        ends = (found.median, found.low, found.high) if found else ()
        values += [f"{end * scale:.6g}" for end in ends] or ["", "", ""]
    parts = row.parts or {}
    values.append(f"{row.synchronisation:.6g}" if parts else "")
    values += [f"{parts[part]:.6g}" if part in parts else "" for part in PARTS]
    return [*values, str(row.repeats), str(row.failed), row.reason or "", "; ".join(row.notes)]
