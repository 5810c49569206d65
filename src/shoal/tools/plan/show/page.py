"""A search result or a comparison with a run as an HTML page, in the style of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from shoal.tools.plan.check import RunCheck
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.device_numbers import NumberOfDevices, numbers_table, numbers_verdict
from shoal.tools.plan.search.search import Prediction, SearchResult
from shoal.tools.plan.search.what_if import WhatIf
from shoal.tools.plan.show.display import (
    ANSWER_HEAD,
    CHECK_HEAD,
    answer_rows,
    check_rows,
    part_name,
    training_parts,
    training_sentences,
    training_table,
)
from shoal.tools.plan.show.fastest_table import fastest_table
from shoal.tools.plan.time.bands import step_band
from shoal.tools.plan.time.pipeline_run import run_pipeline
from shoal.tools.plan.time.spans import Span
from shoal.tools.plan.training.whole_training import TrainingEstimate
from shoal.tools.plan.work.configuration import PlannedLayout, PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.document import (
    BarPlot,
    Document,
    DocumentBlock,
    Figure,
    KeyNumbers,
    LinePlot,
    Section,
    Series,
    SpanPlot,
    Table,
    Text,
)
from shoal.util.units import compact, counted, duration, size

_FARTHEST = 5.0
"""The largest multiple of the longest bar at which a limit is drawn."""


def plan_page(
    model: Transformer,
    machine: Machine,
    result: SearchResult,
    trainings: Sequence[TrainingEstimate],
    answers: Sequence[WhatIf] = (),
) -> Document:
    """Return the page of a search: the fastest configurations, their parts and memory, answers to
    questions, the training with each of them, the others."""
    sections = [Section(heading="Fastest", blocks=_fastest(model, machine, result.best))]
    if result.best:
        sections += [
            Section(heading="Where a step's time goes", blocks=[_steps(result.best)]),
            Section(heading="Memory of a rank", blocks=[_memory(result.best, machine)]),
        ]
    pipelines = [each.plan for each in result.best if each.plan.layout.pipeline > 1]
    if pipelines:
        blocks = _timeline(model, pipelines[0], machine)
        sections.append(Section(heading="Pipeline", blocks=blocks))
    if answers:
        table = Table(
            caption="The fastest layout after a change, compared with the first.",
            head=ANSWER_HEAD,
            rows=answer_rows(answers),
            right=ANSWER_HEAD[2:3],
        )
        sections.append(Section(heading="What if", blocks=[table]))
    if trainings:
        sections.append(
            Section(heading="Whole training", blocks=training_blocks(result.best, trainings))
        )
    rows = [(str(each.plan.layout), reason) for each, reason in result.rejected]
    others = Table(caption="The best of other axes.", head=("layout", "why not"), rows=rows)
    sections.append(Section(heading="Others", blocks=[others]))
    verdict = "No configuration fits."
    if result.best:
        first = result.best[0]
        verdict = f"{first.plan.layout} is the fastest: {duration(first.step.total)} per step."
    return Document(
        title=f"{compact(model.parameters)} parameters on {machine.name}",
        verdict=verdict,
        about=f"shoal plan, {result.fitting:,} of {result.tried:,} configurations fit",
        sections=sections,
    )


def check_page(found: RunCheck) -> Document:
    """Return the page of a comparison with a run."""
    rows = check_rows(found)
    table = Table(caption="A step by part.", head=CHECK_HEAD, rows=rows, right=CHECK_HEAD[1:])
    predicted = {each.name: each.predicted or 0.0 for each in found.parts}
    measured = {each.name: each.measured for each in found.parts}
    caption = "Milliseconds of a step by part, predicted and measured."
    bars = bars_figure("step", caption, CHECK_HEAD[1:], [predicted, measured], 1e3, "milliseconds")
    return Document(
        title=f"Prediction and run: {found.plan.layout}",
        verdict=found.verdict,
        about=f"shoal plan --check, {found.steps:,} steps",
        sections=[Section(heading="Parts", blocks=[bars, table])],
    )


def numbers_page(model: Transformer, machine: Machine, found: Sequence[NumberOfDevices]) -> Document:
    """Return the page of a comparison of numbers of devices: throughput with its band, and a table."""
    heads, rows = numbers_table(model, found)
    best = [each.best for each in found if each.best]
    verdict = numbers_verdict(found) or "The throughput of the fastest layouts."
    blocks: list[DocumentBlock] = [_throughput(model, best)] if best else []
    blocks.append(Table(caption="The fastest layouts.", head=heads, rows=rows, right=heads[2:]))
    blocks += [
        Text(text=f"{counted(each.devices, 'device')}: {each.reason}.")
        for each in found
        if not each.best
    ]
    return Document(
        title=f"{compact(model.parameters)} parameters on {machine.name}",
        verdict=verdict,
        about=f"shoal plan, {counted(len(found), 'number')} of devices",
        sections=[Section(heading="Throughput", blocks=blocks)],
    )


def _throughput(model: Transformer, best: Sequence[Prediction]) -> Figure:
    devices = [float(each.plan.layout.size) for each in best]
    tokens = [each.plan.global_batch * model.seq for each in best]
    bands = [step_band(each.plan, each.step) for each in best]
    predicted = [count / each.step.total for count, each in zip(tokens, best, strict=True)]
    low = [count / high for count, (_, high) in zip(tokens, bands, strict=True)]
    high = [count / low for count, (low, _) in zip(tokens, bands, strict=True)]
    lines = [
        Series(label="predicted", x=devices, y=predicted, low=low, high=high, points=True),
        Series(
            label="proportional to devices",
            x=devices,
            y=[predicted[0] * count / devices[0] for count in devices],
            faint=True,
        ),
    ]
    return Figure(
        name="throughput",
        caption="Tokens per second of the fastest layout on each number of devices. 80 % of measured "
        "steps of the same kinds are within the band.",
        drawing=LinePlot(
            series=lines,
            x="devices",
            y="tokens/s",
            log_x=True,
            log_y=True,
            ticks=sorted(set(devices)),
            band=("80 % from", "to"),
        ),
    )


def _fastest(model: Transformer, machine: Machine, best: Sequence[Prediction]) -> list[DocumentBlock]:
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


def training_blocks(
    best: Sequence[PlannedLayout], trainings: Sequence[TrainingEstimate]
) -> list[DocumentBlock]:
    """Return the training in each layout, and its parts in the first."""
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
    caption = "Predicted milliseconds of a step by part."
    return bars_figure("step", caption, _labels(best), parts, 1e3, "milliseconds")


def _memory(best: Sequence[Prediction], machine: Machine) -> Figure:
    kinds = [asdict(each.memory) for each in best]
    caption = "Predicted memory of a rank by kind."
    limit = machine.available
    return bars_figure("memory", caption, _labels(best), kinds, 1e-9, "GB", limit=limit)


def _timeline(model: Transformer, plan: PlannedStep, machine: Machine) -> list[DocumentBlock]:
    """Return the figure of a pipeline, of its first rounds if it has many micro-batches."""
    spans: list[list[Span]] = [[] for _ in range(plan.layout.pipeline)]
    run_pipeline(model, plan, machine, spans)
    text = f"{plan.layout} with the schedule {plan.schedule}: when each rank computes what."
    return [timeline_figure(f"{text} In the gaps, it waits.", spans)]


def timeline_figure(caption: str, ranks: Sequence[Sequence[Span]]) -> Figure:
    """Return a figure of the spans of the ranks of a pipeline, with a table of their seconds."""
    return Figure(
        name="pipeline",
        caption=caption,
        drawing=SpanPlot(
            labels=[f"rank {place}" for place in range(len(ranks))],
            spans=[[(kind, start * 1e3, stop * 1e3) for kind, start, stop in row] for row in ranks],
            x="milliseconds",
            of="rank",
        ),
    )


def _labels(best: Sequence[Prediction]) -> list[str]:
    return [f"{place}: {each.plan.layout}" for place, each in enumerate(best, 1)]


def bars_figure(
    name: str,
    caption: str,
    labels: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    scale: float,
    unit: str,
    *,
    limit: float | None = None,
) -> Figure:
    """Return a bar of parts for each label, with a table of the values times `scale`, in `unit`.

    Parts below a thousandth of all bars are left out. `limit` is drawn as a line, unless it is so far
    away that the bars would be invisible.
    """
    used = [part for part in parts[0] if any(each[part] > 0.001 * sum(each.values()) for each in parts)]
    values = {part: [each[part] * scale for each in parts] for part in used}
    longest = max(sum(each.values()) for each in parts)
    drawn = limit is not None and limit < _FARTHEST * longest
    line = ("usable memory", limit * scale) if limit is not None and drawn else None
    return Figure(
        name=name,
        caption=caption,
        drawing=BarPlot(labels=labels, parts=values, x=unit, of="configuration", limit=line),
    )
