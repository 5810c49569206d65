"""A search result or a comparison with a run as an HTML page, in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from shoal.plan.check import RunCheck
from shoal.plan.display import (
    ANSWER_HEAD,
    CHECK_HEAD,
    answer_rows,
    check_rows,
    part_name,
    training_parts,
    training_sentences,
    training_table,
)
from shoal.plan.fastest_table import fastest_table
from shoal.plan.machines import Machine
from shoal.plan.model import Transformer
from shoal.plan.search import Prediction, SearchResult
from shoal.plan.what_if import WhatIf
from shoal.plan.whole_training import TrainingEstimate
from shoal.report import PALETTE
from shoal.report.html import Block, Figure, KeyNumbers, Page, Section, Table, Text
from shoal.report.html.plots import Fill, plot_bars
from shoal.util.units import compact, duration, size, three_digits

_FILLS = tuple((each.colour, each.hatch) for each in PALETTE.values())


def plan_page(
    model: Transformer,
    machine: Machine,
    result: SearchResult,
    trainings: Sequence[TrainingEstimate],
    answers: Sequence[WhatIf] = (),
) -> Page:
    """Return the page of a search: the fastest configurations, their parts and memory, answers to
    questions, the training with each of them, the others."""
    sections = [Section(heading="Fastest", blocks=_fastest(model, machine, result.best))]
    if result.best:
        sections += [
            Section(heading="Where a step's time goes", blocks=[_steps(result.best)]),
            Section(heading="Memory of a rank", blocks=[_memory(result.best)]),
        ]
    if answers:
        table = Table(
            caption="The fastest layout after a change, compared with the first.",
            head=ANSWER_HEAD,
            rows=answer_rows(answers),
            right=ANSWER_HEAD[2:3],
        )
        sections.append(Section(heading="What if", blocks=[table]))
    if trainings:
        sections.append(Section(heading="Whole training", blocks=_trainings(result.best, trainings)))
    rows = [(str(each.plan.layout), reason) for each, reason in result.rejected]
    others = Table(caption="The best of other axes.", head=("layout", "why not"), rows=rows)
    sections.append(Section(heading="Others", blocks=[others]))
    verdict = "No configuration fits."
    if result.best:
        first = result.best[0]
        verdict = f"{first.plan.layout} is the fastest: {duration(first.step.total)} per step."
    return Page(
        title=f"{compact(model.parameters)} parameters on {machine.name}",
        verdict=verdict,
        about=f"shoal plan, {result.fitting:,} of {result.tried:,} configurations fit",
        sections=sections,
    )


def check_page(found: RunCheck) -> Page:
    """Return the page of a comparison with a run."""
    rows = check_rows(found)
    table = Table(caption="A step by part.", head=CHECK_HEAD, rows=rows, right=CHECK_HEAD[1:])
    return Page(
        title=f"Prediction and run: {found.plan.layout}",
        verdict=found.verdict,
        about=f"shoal plan --check, {found.steps:,} steps",
        sections=[Section(heading="Parts", blocks=[table])],
    )


def _fastest(model: Transformer, machine: Machine, best: Sequence[Prediction]) -> list[Block]:
    if not best:
        return [Text(text="Use more devices, more memory, or --precision half.")]
    head, rows = fastest_table(model, machine, best)
    first = best[0]
    tokens = first.plan.global_batch * model.seq / first.step.total
    return [
        KeyNumbers(pairs=[("tokens/s", compact(tokens)), ("usable memory", size(machine.available))]),
        Text(text=f"The strategy of the first: {first.plan.strategy}."),
        Table(caption="The fastest configurations that fit.", head=head, rows=rows, right=head[-3:]),
    ]


def _trainings(best: Sequence[Prediction], trainings: Sequence[TrainingEstimate]) -> list[Block]:
    head, cells = training_table(best, trainings)
    layouts = Table(caption="The training by layout.", head=head, rows=cells, right=head[1:])
    found = trainings[0]
    rows = [(name, duration(value)) for name, value in training_parts(found)]
    table = Table(
        caption="The median training with the first by part.",
        head=("part", "time"),
        rows=rows,
        right=("time",),
    )
    return [Text(text=" ".join(training_sentences(found))), layouts, table]


def _steps(best: Sequence[Prediction]) -> Figure:
    parts = [{part_name(name): value for name, value in asdict(each.step).items()} for each in best]
    return _bars("step", "Predicted milliseconds of a step by part.", best, parts, 1e3, "milliseconds")


def _memory(best: Sequence[Prediction]) -> Figure:
    kinds = [asdict(each.memory) for each in best]
    return _bars("memory", "Predicted memory of a rank by kind.", best, kinds, 1e-9, "GB")


def _bars(
    name: str,
    caption: str,
    best: Sequence[Prediction],
    parts: Sequence[Mapping[str, float]],
    scale: float,
    unit: str,
) -> Figure:
    labels = [f"{place}: {each.plan.layout}" for place, each in enumerate(best, 1)]
    used = [part for part in parts[0] if any(each[part] > 0.001 * sum(each.values()) for each in parts)]
    values = {part: [each[part] * scale for each in parts] for part in used}
    fills: dict[str, Fill] = {part: _FILLS[place % len(_FILLS)] for place, part in enumerate(used)}
    head = ("configuration", *used)
    rows = [
        (label, *(three_digits(values[part][place]) for part in used))
        for place, label in enumerate(labels)
    ]
    return Figure(
        name=name,
        caption=caption,
        drawing=plot_bars(labels, values, x=unit, fills=fills),
        table=Table(caption=f"{unit}, as drawn.", head=head, rows=rows, right=head[1:]),
    )
