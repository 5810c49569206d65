"""A page about a study, or a comparison of two: the diagnosis, plots, tables, machine and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.tools.bench.scaling import compare, format
from shoal.tools.bench.scaling.aggregate import ScalingPoint
from shoal.tools.bench.scaling.compare import Pair
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.tools.bench.scaling.curves import WIDE, scaling_blocks, throughput_series
from shoal.tools.bench.scaling.diagnosis import curve_labels, diagnose_curves, find_causes
from shoal.tools.bench.scaling.directory import Study
from shoal.tools.bench.scaling.job_summary import PARTS, SHOWN
from shoal.tools.bench.scaling.subject import throughput_unit
from shoal.tools.report import PALETTE
from shoal.util.clock import utc_time
from shoal.util.document import (
    BarPlot,
    Document,
    DocumentBlock,
    Figure,
    KeyNumbers,
    LinePlot,
    Section,
    Table,
    Text,
)

LEAST = 0.001
"""Minimum fraction of a step for a part to be drawn."""
TOLD = 0.005
"""Minimum fraction of a step for a cause to be in the table."""
FILLS = {SHOWN[part]: (PALETTE[part].colour, PALETTE[part].hatch) for part in PARTS}
FIELDS = ("processes", "scalings", "backends", "strategies", "precisions", "ways")
COUNTS = ("batch", "steps", "warmup", "rounds", "threads", "limit")


def study_page(study: Study, rows: Sequence[ScalingPoint], notes: Sequence[str]) -> Document:
    """Return the page of a study, from the measured rows and the notes on them."""
    word, each = throughput_unit(study.options.subject)
    told = diagnose_curves(rows)
    names = curve_labels([curve for curve, _ in told])
    first = names[told[0][0]] + ": " if len(told) > 1 else ""
    sections = [
        Section(heading="Diagnosis", blocks=_diagnosis(rows, told, names, notes)),
        Section(heading="Throughput and step time", blocks=scaling_blocks(rows, names, word, each)),
        Section(heading="Where a step's time goes", blocks=_time(rows, names)),
        Section(heading="All figures", blocks=_tables(rows, word, each)),
        Section(heading="Circumstances", blocks=_circumstances(study)),
    ]
    began = utc_time(study.began, "%Y-%m-%d %H:%M UTC")
    return Document(
        title=f"How {study.options.model} scales",
        verdict=first + told[0][1],
        about=f"shoal bench scaling, started {began} on {study.where}",
        sections=sections,
    )


def _diagnosis(
    rows: Sequence[ScalingPoint],
    told: Sequence[tuple[ScalingCurve, str]],
    names: Mapping[ScalingCurve, str],
    notes: Sequence[str],
) -> list[DocumentBlock]:
    blocks: list[DocumentBlock] = [Text(text=f"{names[curve]}: {text}.") for curve, text in told]
    blocks += [Text(text=f"{note[:1].upper()}{note[1:]}.") for note in notes]
    lost = []
    for row in rows:
        base = _base(rows, row)
        if base is None or base is row or row.parts is None:
            continue
        for cause in find_causes(row, base):
            if abs(cause.share) >= TOLD:
                share = f"{cause.share * 100:.1f}"
                lost.append((names[row.curve], str(row.processes), share, cause.text))
    if lost:
        head = ("curve", "n", "% of a step", "cause")
        caption = (
            "The time of a step beyond perfect scaling, in percent of the step; negative values are "
            "gains. For each number n of processes, the values and the efficiency add up to 100 %, "
            "except for causes below half a percent."
        )
        blocks.append(Table(caption=caption, head=head, rows=lost, right=head[1:3]))
    failed = [row for row in rows if row.reason is not None]
    if failed:
        reasons = [(str(row.configuration), row.reason or "") for row in failed]
        blocks.append(Table(caption="Failures.", head=("configuration", "reason"), rows=reasons))
    return blocks


def _base(rows: Sequence[ScalingPoint], row: ScalingPoint) -> ScalingPoint | None:
    return next((r for r in rows if r.curve == row.curve and r.configuration == row.base), None)


def _time(rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str]) -> list[DocumentBlock]:
    labelled: dict[str, ScalingPoint] = {}
    for row in rows:
        if row.parts is not None:
            many = f"{row.processes}" if row.base == row.configuration else None
            label = f"{many}, batch {row.configuration.batch}" if many else ""
            labelled.setdefault(label or f"{row.processes} {names[row.curve]}", row)
    if not labelled:
        return [Text(text="No job has run.")]
    return [parts_figure("parts", labelled, "Milliseconds of a step by part, on a typical process.")]


def parts_figure(name: str, labelled: Mapping[str, ScalingPoint], caption: str) -> Figure:
    """Return a figure with one labelled bar of the parts of a step for each row."""
    given = [row.parts or {} for row in labelled.values()]
    used = [
        part
        for part in PARTS
        if any(parts.get(part, 0.0) >= LEAST * sum(parts.values()) > 0 for parts in given)
    ]
    values = {SHOWN[part]: [max(0.0, parts.get(part, 0.0)) * 1e3 for parts in given] for part in used}
    drawing = BarPlot(
        labels=list(labelled),
        parts=values,
        x="milliseconds of a step",
        of="processes and curve",
        fills=FILLS,
    )
    return Figure(name=name, caption=caption, drawing=drawing)


def _tables(rows: Sequence[ScalingPoint], word: str, each: int) -> list[DocumentBlock]:
    head = format.curve_headers(word)
    blocks: list[DocumentBlock] = [
        Table(
            caption=str(curve),
            head=head,
            rows=[
                format.curve_cells(row, each, format.format_range) for row in rows if row.curve == curve
            ],
            right=head,
        )
        for curve in dict.fromkeys(row.curve for row in rows)
    ]
    words = (
        f"n: processes. batch: of all of them. {word}/s, speed-up and eff.: the median of the rounds "
        "(lowest to highest), each against the smallest n of the same round. ms/step: the median of "
        "all steps (quartiles). sync: the time per step inside collectives, including waiting. "
        "runs: jobs that succeeded."
    )
    return [*blocks, Text(text=words)]


def _circumstances(study: Study) -> list[DocumentBlock]:
    options = study.options.plain()
    asked = [(name, ", ".join(map(str, options[name]))) for name in FIELDS]
    asked += [(name, str(options[name])) for name in COUNTS]
    if options["args"]:
        asked.append(("arguments", " ".join(options["args"])))
    head = ("what", "value")
    facts = ("host", "site", "cores", "torch")
    return [
        KeyNumbers(pairs=[(name, study.machine[name]) for name in facts if name in study.machine]),
        Table(caption="Options.", head=head, rows=asked),
        Table(caption="The machine.", head=head, rows=list(study.machine.items())),
    ]


def compare_page(
    first: Study, second: Study, pairs: Sequence[Pair], called: tuple[str, str]
) -> Document:
    """Return the page of two studies, from the pairs that both have measured, with their names."""
    word, each = throughput_unit(first.options.subject)
    names = curve_labels(list(dict.fromkeys(pair.curve for pair in pairs)))
    last = compare.largest_pairs(pairs)
    told = [f"{names[pair.curve]}: {compare.describe_pair(pair, *called)}" for pair in last]
    differ = compare.study_differences(first, second)
    ways = [Text(text=f"{text}.") for text in told]
    head = ("curve", "processes", *(f"{name}, {word}/s" for name in called), "ratio")
    cells = ratio_cells(pairs, names, each)
    caption = "Throughput of both, and the ratio of the second to the first (lowest to highest)."
    ratios = Table(caption=caption, head=head, rows=cells, right=head[1:])
    return Document(
        title=f"{called[0]} and {called[1]}: {first.options.model}",
        verdict=told[0],
        about="shoal bench compare",
        sections=[
            Section(heading="Ratios", blocks=[*ways, ratios]),
            Section(heading="Throughput", blocks=_overlaid(pairs, names, word, each, called)),
            Section(heading="Where a step's time goes", blocks=[_beside(pairs, names, called)]),
            Section(
                heading="Differences",
                blocks=[Text(text=f"{each}.") for each in differ] or [Text(text="None known.")],
            ),
        ],
    )


def ratio_cells(
    pairs: Sequence[Pair], names: Mapping[ScalingCurve, str], each: int
) -> list[tuple[str, ...]]:
    """Return a row for each pair: its curve, processes, both throughputs and their ratio."""
    return [
        (
            names[pair.curve],
            str(pair.configuration.processes),
            *(format.format_spread(row.rate, each) for row in (pair.first, pair.second) if row.rate),
            format.format_range(pair.ratio, 1),
        )
        for pair in pairs
    ]


def _overlaid(
    pairs: Sequence[Pair],
    names: Mapping[ScalingCurve, str],
    word: str,
    each: int,
    called: tuple[str, str],
) -> list[DocumentBlock]:
    blocks: list[DocumentBlock] = []
    for scaling in dict.fromkeys(pair.curve.scaling for pair in pairs):
        own = [pair for pair in pairs if pair.curve.scaling == scaling]
        drawn = []
        for curve in dict.fromkeys(pair.curve for pair in own):
            both = zip(*((p.first, p.second) for p in own if p.curve == curve), strict=True)
            for name, rows in zip(called, both, strict=True):
                drawn.append(throughput_series(f"{name}: {names[curve]}", rows, each))
        sizes = sorted({pair.configuration.processes for pair in own})
        wide = sizes[-1] > WIDE
        blocks.append(
            Figure(
                name=f"compared-{scaling}",
                caption=f"{word.capitalize()} per second against processes, {scaling} scaling.",
                drawing=LinePlot(
                    series=drawn,
                    x="processes",
                    y=f"{word}/s",
                    log_x=wide,
                    log_y=wide,
                    ticks=sizes,
                    zero=True,
                ),
            )
        )
    return blocks


def _beside(
    pairs: Sequence[Pair], names: Mapping[ScalingCurve, str], called: tuple[str, str]
) -> Figure:
    labelled = {
        f"{pair.configuration.processes} {names[pair.curve]}: {name}": row
        for pair in pairs
        for name, row in zip(called, (pair.first, pair.second), strict=True)
    }
    return parts_figure("compared-parts", labelled, "Milliseconds of a step by part, side by side.")
