"""Cells, tables and figures of studies, the same in the terminal, on the page and in CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from shoal.tools.bench.scaling.aggregate import PARTS, SHOWN, ScalingPoint, Spread
from shoal.tools.bench.scaling.configurations import ScalingCurve, Subject, throughput_unit
from shoal.tools.report import PALETTE
from shoal.util.document import BarPlot, Figure, LinePlot, Series, Table
from shoal.util.grouping import group_by
from shoal.util.units import counted, three_digits

WIDE = 8
"""Axes are logarithmic for more processes than this."""
LEAST = 0.001
"""Minimum fraction of a step for a part to be drawn."""
FILLS = {SHOWN[part]: (PALETTE[part].colour, PALETTE[part].hatch) for part in PARTS}


def scaling_figures(
    scaling: str, rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str], unit: str, each: int
) -> list[Figure]:
    """Return the figures of the measured rows of one kind of scaling; `each` is units per sample."""
    curves = {names[curve]: own for curve, own in group_by(rows, lambda row: row.curve).items()}
    sizes = sorted({row.processes for row in rows})
    most = max(row.rate.median for row in rows if row.rate and row.processes == sizes[0])
    least = min(row.base.processes for row in rows if row.base)
    return [
        line_figure(
            f"throughput-{scaling}",
            f"{unit.capitalize()} per second against processes, {scaling} scaling: the median of the "
            "rounds, with a band from the slowest to the fastest.",
            [_ideal(sizes, most * each / sizes[0]), *spread_lines(curves, lambda row: row.rate, each)],
            f"{unit}/s",
            band=("slowest", "fastest"),
        ),
        line_figure(
            f"iteration-{scaling}",
            f"Milliseconds per step against processes, {scaling} scaling: the mean of a typical "
            "process. The band below a line is the time inside collectives, including waiting.",
            spread_lines(
                curves,
                lambda row: Spread(median=row.mean, low=row.mean - row.synchronisation, high=row.mean),
                1e3,
            ),
            "milliseconds per step",
            band=("without collectives", "all"),
            log_y=False,
        ),
        line_figure(
            f"speedup-{scaling}",
            f"Speed-up over {counted(least, 'process', 'es')} of the same curve, {scaling} scaling: "
            "the median of the rounds, with a band from the lowest to the highest.",
            [_ideal(sizes, 1 / least), *spread_lines(curves, lambda row: row.speedup, 1)],
            "speed-up",
            band=("lowest", "highest"),
        ),
    ]


def spread_lines(
    curves: Mapping[str, Sequence[ScalingPoint]],
    of: Callable[[ScalingPoint], Spread | None],
    scale: float,
) -> list[Series]:
    """Return a line with its band for each labelled curve: what `of` returns, times `scale`."""
    found = []
    for label, rows in curves.items():
        known = [(row.processes, value) for row in rows if (value := of(row)) is not None]
        found.append(
            Series(
                label=label,
                x=[size for size, _ in known],
                y=[value.median * scale for _, value in known],
                low=[value.low * scale for _, value in known],
                high=[value.high * scale for _, value in known],
                points=True,
            )
        )
    return found


def line_figure(
    name: str,
    caption: str,
    series: Sequence[Series],
    y: str,
    *,
    log_y: bool = True,
    band: tuple[str, str] = ("minimum", "maximum"),
) -> Figure:
    """Return a figure of lines by the number of processes; `log_y` is for many processes."""
    sizes = sorted({size for each in series for size in each.x})
    wide = sizes[-1] > WIDE
    drawing = LinePlot(
        series=series,
        x="processes",
        y=y,
        log_x=wide,
        log_y=wide and log_y,
        ticks=sizes,
        zero=True,
        band=band,
    )
    return Figure(name=name, caption=caption, drawing=drawing)


def parts_figure(name: str, labelled: Mapping[str, ScalingPoint], caption: str) -> Figure:
    """Return a figure with one labelled bar of the parts of a step for each row."""
    given = [row.parts or {} for row in labelled.values()]
    used = [
        part
        for part in PARTS
        if any(parts.get(part, 0.0) >= LEAST * sum(parts.values()) > 0 for parts in given)
    ]
    drawing = BarPlot(
        labels=list(labelled),
        parts={SHOWN[part]: [max(0.0, parts.get(part, 0.0)) * 1e3 for parts in given] for part in used},
        x="milliseconds of a step",
        of="processes and curve",
        fills=FILLS,
    )
    return Figure(name=name, caption=caption, drawing=drawing)


def _ideal(sizes: Sequence[int], slope: float) -> Series:
    return Series(label="ideal", x=sizes, y=[slope * size for size in sizes], faint=True)


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
        (f"median {unit}/s (speed-up)", lambda row: _rated(row, each)),
        (
            "mean ms/step (synchronization)",
            lambda row: f"{three_digits(row.mean * 1e3)} ({three_digits(row.synchronisation * 1e3)})",
        ),
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
