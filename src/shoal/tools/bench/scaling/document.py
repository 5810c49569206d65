"""The results of a study as a document: the diagnosis, curves, parts of a step, machine and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.tools.bench.scaling import format
from shoal.tools.bench.scaling.aggregate import ScalingPoint, all_notes
from shoal.tools.bench.scaling.configurations import ScalingCurve
from shoal.tools.bench.scaling.diagnosis import curve_labels, diagnose_curves, find_causes
from shoal.tools.bench.scaling.directory import Study
from shoal.tools.bench.scaling.figures import parts_figure, scaling_figures
from shoal.tools.bench.scaling.subject import throughput_unit
from shoal.util.clock import utc_time
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text, to_plain

TOLD = 0.005
"""Minimum fraction of a step for a cause to be in the table."""
FACTS = ("host", "site", "cores", "torch")


def study_document(study: Study, rows: Sequence[ScalingPoint]) -> Document:
    """Return the results of a study, from at least one row."""
    word, each = throughput_unit(study.options.subject)
    told = diagnose_curves(rows)
    names = curve_labels([curve for curve, _ in told])
    verdict, *rest = (f"{names[curve]}: {text}." for curve, text in told)
    notes = (f"{note[:1].upper()}{note[1:]}." for note in all_notes(rows, study.repeats()))
    return Document(
        title=f"How {study.options.model} scales",
        verdict=verdict,
        about="shoal bench scaling, started "
        f"{utc_time(study.began, '%Y-%m-%d %H:%M UTC')} on {study.where}",
        sections=[
            Section(
                heading="Diagnosis",
                blocks=[
                    *(Text(text=text) for text in (*rest, *notes)),
                    *format.curve_tables(rows, study.options.model, word, each, only="terminal"),
                    _causes(rows, names),
                    _failures(rows),
                ],
            ),
            Section(heading="Throughput and step time", blocks=_scalings(rows, names, word, each)),
            Section(heading="Where a step's time goes", blocks=[_time(rows, names)]),
            Section(
                heading="All figures",
                blocks=[
                    *format.curve_tables(rows, study.options.model, word, each, only="page"),
                    _legend(word),
                ],
            ),
            Section(heading="Circumstances", blocks=_circumstances(study)),
        ],
    )


def _causes(rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str]) -> Table:
    bases = {(row.curve, row.configuration): row for row in rows}
    pairs = [(row, bases[row.curve, row.base]) for row in rows if row.base is not None]
    found = [
        (names[row.curve], str(row.processes), f"{cause.share * 100:.1f}", cause.text)
        for row, base in pairs
        if row is not base
        for cause in find_causes(row, base)
        if abs(cause.share) >= TOLD
    ]
    return Table(
        caption="The time of a step beyond perfect scaling, in percent of the step; negative values "
        "are gains. For each number n of processes, the values and the efficiency add up to 100 %, "
        "except for causes below half a percent.",
        head=("curve", "n", "% of a step", "cause"),
        rows=found,
        right=("n", "% of a step"),
        only="page",
    )


def _failures(rows: Sequence[ScalingPoint]) -> Table:
    return Table(
        caption="Failures.",
        head=("configuration", "reason"),
        rows=[(str(row.configuration), row.reason) for row in rows if row.reason is not None],
        only="page",
    )


def _scalings(
    rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str], word: str, each: int
) -> list[DocumentBlock]:
    blocks: list[DocumentBlock] = []
    for scaling in dict.fromkeys(row.curve.scaling for row in rows):
        own = [row for row in rows if row.curve.scaling == scaling and row.rate is not None]
        if own:
            blocks += format.comparison_tables(own, names, word, each)
            blocks += scaling_figures(scaling, own, names, word, each)
    return blocks


def _time(rows: Sequence[ScalingPoint], names: Mapping[ScalingCurve, str]) -> DocumentBlock:
    labelled: dict[str, ScalingPoint] = {}
    for row in rows:
        if row.parts is not None:
            alone = f"{row.processes}, batch {row.configuration.batch}"
            shared = row.base == row.configuration  # by all curves
            labelled.setdefault(alone if shared else f"{row.processes} {names[row.curve]}", row)
    if not labelled:
        return Text(text="No job has run.", only="page")
    return parts_figure("parts", labelled, "Milliseconds of a step by part, on a typical process.")


def _legend(word: str) -> Text:
    return Text(
        text=f"n: processes. batch: of all of them. {word}/s, speed-up and eff.: the median of the "
        "rounds (lowest to highest), each against the smallest n of the same round. ms/step: the "
        "median of all steps (quartiles). sync: the time per step inside collectives, including "
        "waiting. runs: jobs that succeeded.",
        only="page",
    )


def _circumstances(study: Study) -> list[DocumentBlock]:
    options = to_plain(study.options)
    args = options.pop("args")
    asked = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in options.items()
        if name != "model"
    ]
    asked += [("arguments", " ".join(args))] if args else []
    head = ("what", "value")
    facts = [(name, study.machine[name]) for name in FACTS if name in study.machine]
    return [
        KeyNumbers(pairs=facts, only="page"),
        Table(caption="Options.", head=head, rows=asked, only="page"),
        Table(caption="The machine.", head=head, rows=list(study.machine.items()), only="page"),
    ]
