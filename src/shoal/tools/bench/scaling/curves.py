"""The curves of a study against the number of processes: throughput, step time, speed-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.tools.bench.scaling import format
from shoal.tools.bench.scaling.aggregate import ScalingPoint, Spread
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.util.document import DocumentBlock, Figure, LinePlot, Series
from shoal.util.grouping import group_by
from shoal.util.units import counted

WIDE = 8
"""Axes are logarithmic for more processes than this."""

Names = Mapping[ScalingCurve, str]


def scaling_blocks(
    rows: Sequence[ScalingPoint], names: Names, word: str, each: int
) -> list[DocumentBlock]:
    """Return a table of each curve, then its plots, for each kind of scaling."""
    blocks: list[DocumentBlock] = []
    for scaling in dict.fromkeys(row.curve.scaling for row in rows):
        own = [row for row in rows if row.curve.scaling == scaling and row.rate is not None]
        if own:
            blocks += format.comparison_tables(own, names, word, each)
            blocks += [
                _throughput(scaling, own, names, word, each),
                _iteration(scaling, own, names),
                _speedup(scaling, own, names),
            ]
    return blocks


def throughput_series(label: str, rows: Sequence[ScalingPoint], each: int) -> Series:
    """Return the throughput of a curve, with the slowest and the fastest round."""
    return _line(label, [(row.processes, row.rate) for row in rows if row.rate is not None], each)


def _line(label: str, known: Sequence[tuple[int, Spread]], scale: float) -> Series:
    return Series(
        label=label,
        x=[size for size, _ in known],
        y=[value.median * scale for _, value in known],
        low=[value.low * scale for _, value in known],
        high=[value.high * scale for _, value in known],
        points=True,
    )


def _by_curve(rows: Sequence[ScalingPoint]) -> dict[ScalingCurve, list[ScalingPoint]]:
    return group_by(rows, lambda row: row.curve)


def _throughput(
    scaling: str, rows: Sequence[ScalingPoint], names: Names, word: str, each: int
) -> Figure:
    sizes = sorted({row.processes for row in rows})
    start = max((row for row in rows if row.processes == sizes[0]), key=_rate)
    ideal = [_rate(start) * each * size / start.processes for size in sizes]
    drawn = [Series(label="ideal", x=sizes, y=ideal, faint=True)]
    drawn += [throughput_series(names[curve], own, each) for curve, own in _by_curve(rows).items()]
    wide = sizes[-1] > WIDE
    return Figure(
        name=f"throughput-{scaling}",
        caption=f"{word.capitalize()} per second against processes, {scaling} scaling: the median of "
        "the rounds, with a band from the slowest to the fastest.",
        drawing=LinePlot(
            series=drawn,
            x="processes",
            y=f"{word}/s",
            log_x=wide,
            log_y=wide,
            ticks=sizes,
            zero=True,
            band=("slowest", "fastest"),
        ),
    )


def _iteration(scaling: str, rows: Sequence[ScalingPoint], names: Names) -> Figure:
    sizes = sorted({row.processes for row in rows})
    drawn = []
    for curve, own in _by_curve(rows).items():
        whole = [row.mean * 1e3 for row in own]
        inside = [row.synchronisation * 1e3 for row in own]
        drawn.append(
            Series(
                label=names[curve],
                x=[row.processes for row in own],
                y=whole,
                low=[a - b for a, b in zip(whole, inside, strict=True)],
                high=whole,
                points=True,
            )
        )
    return Figure(
        name=f"iteration-{scaling}",
        caption=f"Milliseconds per step against processes, {scaling} scaling: the mean of a typical "
        "process. The band below a line is the time inside collectives, including waiting.",
        drawing=LinePlot(
            series=drawn,
            x="processes",
            y="milliseconds per step",
            log_x=sizes[-1] > WIDE,
            ticks=sizes,
            zero=True,
            band=("without collectives", "all"),
        ),
    )


def _speedup(scaling: str, rows: Sequence[ScalingPoint], names: Names) -> Figure:
    sizes = sorted({row.processes for row in rows})
    least = min(row.base.processes for row in rows if row.base is not None)
    drawn = [Series(label="ideal", x=sizes, y=[size / least for size in sizes], faint=True)]
    for curve, own in _by_curve(rows).items():
        known = [(row.processes, row.speedup) for row in own if row.speedup is not None]
        drawn.append(_line(names[curve], known, 1))
    wide = sizes[-1] > WIDE
    return Figure(
        name=f"speedup-{scaling}",
        caption=f"Speed-up over {counted(least, 'process', 'es')} of the same curve, {scaling} "
        "scaling: the median of the rounds, with a band from the lowest to the highest.",
        drawing=LinePlot(
            series=drawn,
            x="processes",
            y="speed-up",
            log_x=wide,
            log_y=wide,
            ticks=sizes,
            zero=True,
            band=("lowest", "highest"),
        ),
    )


def _rate(row: ScalingPoint) -> float:
    return row.rate.median if row.rate is not None else 0.0
