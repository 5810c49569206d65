"""The figures of studies: throughput, step time and speed-up by processes, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.tools.bench.scaling.aggregate import ScalingPoint, Spread
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.tools.bench.scaling.job_summary import PARTS, SHOWN
from shoal.tools.report import PALETTE
from shoal.util.document import BarPlot, Figure, LinePlot, Series
from shoal.util.grouping import group_by
from shoal.util.units import counted

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
            spread_lines(curves, _inside_collectives, 1e3),
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


def _inside_collectives(row: ScalingPoint) -> Spread:
    return Spread(median=row.mean, low=row.mean - row.synchronisation, high=row.mean)
