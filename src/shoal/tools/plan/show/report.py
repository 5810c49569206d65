"""The predictions of `shoal plan` as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.search import Prediction, SearchResult, TriedLayout, WhatIf
from shoal.tools.plan.show.parts import (
    memory_bars,
    part_name,
    prediction_values,
    strategy_text,
    time_bars,
    timeline,
    training_blocks,
    training_values,
    utilization,
)
from shoal.tools.plan.time.step_error import step_band
from shoal.tools.plan.time.step_time import Span, pass_seconds, pipeline_bubble
from shoal.tools.plan.training.whole_training import Training, TrainingEstimate, training_of
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.stage_layers import stage_layers
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.document import Document, DocumentBlock, Section, Table, Text
from shoal.util.units import compact, counted, duration, percent, size

_MOMENTS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "update",
    "checks": "checks on the first batch",
}


def module_sections(found: Sequence[Prediction]) -> list[Section]:
    """Return the memory and the time of traced plans, the first in detail, and the changes of it."""
    if not found:
        return []
    labels = [str(each.plan.layout) if each.change == "as given" else each.change for each in found]
    changes = [(each.change, each.verdict) for each in found if each.change != "as given"]
    sections = {"Memory": _memory(labels, found), "Where a step's time goes": _time(labels, found)}
    sections["Changes"] = [
        Table(caption="Changes that need less memory", head=("change", "result"), rows=changes)
    ]
    return [Section(heading=name, blocks=blocks) for name, blocks in sections.items()]


def _memory(labels: Sequence[str], found: Sequence[Prediction]) -> list[DocumentBlock]:
    """Return the bytes at the peak by kind, with the loss of the allocator and the margin."""
    first = found[0]
    kinds = [
        {
            **each.memory.kinds,
            "fragmentation": each.memory.reserved - each.memory.total,
            "margin": each.margin,
        }
        for each in found
    ]
    title, limit = "Memory of a rank", first.available
    blocks: list[DocumentBlock] = []
    if first.plan.split_points:
        title = f"Memory of rank {first.place} of {len(first.runs)} in the pipeline"
        points = ", ".join(first.plan.split_points)
        ranks = [f"rank {place}" for place in range(len(first.runs))]
        head = ("rank", "traced", "peak in the", "waiting")
        waits = [duration(each.time.parts["bubble"]) for each in first.runs]
        rows = [
            (str(place), size(each.total), _MOMENTS[each.moment], wait)
            for place, (each, wait) in enumerate(zip(first.memories, waits, strict=True))
        ]
        blocks += [
            Text(text=f"Rank {first.place} needs most. Stages begin at {points}."),
            Table(caption="Ranks of the pipeline", head=head, rows=rows, right=head[1:2]),
            *memory_bars(
                "",
                "Traced memory of each rank of the pipeline, by kind",
                ranks,
                [each.kinds for each in first.memories],
                limit,
                "ranks",
            ),
        ]
    title += f" at its peak, in the {_MOMENTS[first.memory.moment]}"
    return [*blocks, *memory_bars(title, f"{title}, by kind", labels, kinds, limit)]


def _time(labels: Sequence[str], found: Sequence[Prediction]) -> list[DocumentBlock]:
    """Return the seconds of a step by part, and its collectives."""
    first = found[0]
    text = f"A step takes {duration(first.step_seconds)}."
    if first.imbalance > 1:
        text += (
            " If routers choose at random, the busiest rank's experts get "
            f"{percent(first.imbalance - 1, tenths=True)} more tokens than the mean."
        )
    blocks: list[DocumentBlock] = [
        Text(text=text),
        *time_bars("Step of a rank", "A step by part", labels, [each.time.parts for each in found]),
    ]
    if first.plan.split_points:
        blocks.append(timeline(str(first.plan.layout), [each.spans for each in first.runs]))
    head = ("operation", "calls", "bytes", "time")
    rows = [
        (name.replace("_", "-"), f"{one.calls:,}", size(one.count), duration(one.seconds))
        for name, one in first.collectives.items()
    ]
    table = Table(caption="Collectives of a step, alone", head=head, rows=rows, right=head[1:])
    return [*blocks, table]


_OTHERS = 8
"""Rejected layouts that a terminal shows."""
_NUMERICS = (
    "Precisions differ in their results: fp16 sums gradients in 16 bits, half also keeps no float32 "
    "parameters. Compare losses."
)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The result of a command, and what was asked about it.

    `model` is None for a traced module, whose name is `name`. With a given layout, `changes` are the
    traced plan and changes of it, or the first prediction of a transformer.
    """

    name: str
    machine: Machine
    result: SearchResult
    model: Transformer | None = None
    changes: tuple[Prediction, ...] = ()
    training: Training | None = None
    answers: tuple[WhatIf, ...] = ()
    tried: tuple[TriedLayout, ...] = ()

    @cached_property
    def trainings(self) -> list[TrainingEstimate]:
        """The training in each of the best layouts, if one is asked for."""
        if self.training is None:
            return []
        tokens = 1 if self.model is None else self.model.seq
        return [training_of(self.training, each, self.machine, tokens) for each in self.result.best]


def plan_document(report: PlanReport) -> Document:
    """Return the fastest plans, their time and memory, answers, trainings, and the other layouts."""
    best, machine = report.result.best, report.machine
    verdict = f"No configuration fits {machine.name}: {size(machine.available)} are usable."
    if report.changes:
        first = report.changes[0]
        takes = "" if report.model is None else f"takes {duration(first.step_seconds)} per step and "
        verdict = f"{first.plan.layout} on {machine.name} {takes}{first.verdict}."
    elif best:
        verdict = f"{best[0].plan.layout} is the fastest: {duration(best[0].step_seconds)} per step."
    sections = []
    if report.model is not None or not report.changes:
        sections.append(Section(heading="Fastest", blocks=_fastest(report)))
    if report.model is None:
        sections += module_sections(report.changes or best)
    elif best or report.changes:
        sections += _step_sections(report.model, machine, best or report.changes)
    sections += [
        Section(heading="Tried", blocks=_tried(report.tried)),
        Section(heading="What if", blocks=[_answers(report.answers)]),
    ]
    if report.trainings:
        blocks = training_blocks(best, report.trainings)
        sections.append(Section(heading="Whole training", blocks=blocks))
    sections.append(Section(heading="Others", blocks=_others(report.result)))
    about = "traced on tensors without values"
    if report.model is not None:
        fitting, tried = report.result.fitting, report.result.tried
        about = f"{fitting:,} of {tried:,} configurations fit"
    return Document(
        title=f"{report.name} on {machine.name}",
        verdict=verdict,
        about=f"shoal plan, {about}",
        sections=sections,
        values=_values(report),
    )


def _values(report: PlanReport) -> dict[str, Any]:
    """Return the values of which JSON is made."""
    machine, model, result = report.machine, report.model, report.result

    def of(found: Prediction | None) -> dict[str, Any]:
        return {} if found is None else prediction_values(model, machine, found)

    best = [of(each) for each in result.best]
    for values, training in zip(best, report.trainings, strict=False):
        values["training"] = training_values(training)
    values = {"machine": machine.name, "available_bytes": machine.available, "best": best}
    if report.changes:
        values["fits"] = report.changes[0].fits
    if report.changes and model is None:
        values["tried"] = [of(each) for each in report.changes]
    else:
        values["rejected"] = [
            {"layout": str(each.layout), "reason": each.reason} | of(each.best)
            for each in result.rejected
        ]
    if model is not None:
        values |= {
            "model": asdict(model) | {"parameters": model.parameters},
            "tried": result.tried,
            "fitting": result.fitting,
            "evaluated": result.evaluated,
        }
    values |= {"tried_layouts": report.tried} if report.tried else {}
    answers = [
        {
            "question": each.question,
            "layout": str(each.best.plan.layout) if each.best else None,
            "step_seconds": each.best.step_seconds if each.best else None,
            "ratio": each.ratio,
            "part": each.part,
            "part_change_seconds": each.change,
        }
        for each in report.answers
    ]
    return values | ({"what_if": answers} if answers else {})


def _fastest(report: PlanReport) -> list[DocumentBlock]:
    """Return the fastest plans, the strategy of the first, and how far measurements are from it."""
    model, machine, result = report.model, report.machine, report.result
    blocks: list[DocumentBlock] = []
    if model is not None:
        blocks.append(
            Text(
                text=f"{report.name} on {machine.name}, {size(machine.available)} usable per device. "
                f"{result.fitting:,} of {result.tried:,} configurations fit."
            )
        )
    if not result.best:
        half = "" if model is None else ", or --precision half"
        blocks.append(Text(text=f"Use more devices, or more memory{half}."))
    best = result.best or report.changes
    if not best:
        return blocks
    stages = "" if model is None else _stages(model, best[0].plan)
    blocks += [
        _fastest_table(model, machine, best),
        Text(text=f"The strategy of the first: {strategy_text(best[0])}.{stages}"),
    ]
    if len({each.plan.precision for each in best}) > 1:
        blocks.append(Text(text=_NUMERICS))
    return blocks if model is None else [*blocks, *_band(model, machine, best[0])]


def _stages(model: Transformer, plan: PlannedStep) -> str:
    """Return a sentence on the layers of the stages of a pipeline, unless they are equal."""
    runs = [(layers, len([*own])) for layers, own in groupby(stage_layers(model, plan))]
    if len(runs) == 1:
        return ""
    *several, last = (f"{count} x {layers}" if count > 1 else str(layers) for layers, count in runs)
    return f" Its stages have {', '.join(several)} and {last} layers."


def _fastest_table(model: Transformer | None, machine: Machine, best: Sequence[Prediction]) -> Table:
    """Return a row for each plan."""
    several = len({each.plan.precision for each in best}) > 1
    numbers = ("step", "MFU", "samples/s", "memory")
    rows = []
    for each in best:
        plan, seconds = each.plan, each.step_seconds
        options = [*_options(plan), *([plan.precision] if several else [])]
        rows.append(
            (
                str(plan.layout),
                f"{plan.micro_batches} x {plan.micro_batch}",
                plan.recompute,
                ", ".join(options) if model else "",
                duration(seconds),
                percent(utilization(model, machine, each)) if model else "",
                "" if model else compact(plan.global_batch / seconds),
                size(each.needed),
            )
        )
    return Table(
        caption="Fastest",
        head=("layout", "batches", "recompute", "options", *numbers),
        rows=rows,
        right=numbers,
        whole=("layout",),
    )


def _options(plan: PlannedStep) -> list[str]:
    """Return the schedule of a pipeline, or the options of FSDP, unless they are the usual ones."""
    if plan.layout.pipeline > 1:
        stages = "" if SCHEDULES[plan.schedule].fixed else f" x {plan.stages}"
        return [] if plan.schedule == "1f1b" else [plan.schedule + stages]
    if plan.layout.shard == 1:
        return []
    return ["no reshard"] * plan.keeps_parameters + ["whole"] * plan.keeps_gradients


def _band(model: Transformer, machine: Machine, first: Prediction) -> list[DocumentBlock]:
    """Return the throughput of a prediction and the band of measured steps, as sentences."""
    total, band = first.step_seconds, step_band(first.time, machine)
    tokens = compact(first.plan.global_batch * model.seq / total)
    source = "your known step" if machine.known_step is not None else "published steps"
    blocks: list[DocumentBlock] = [
        Text(
            text=f"The first: {tokens} tokens/s. {duration(total)} is the median; by {source}, 80 % "
            f"are expected from {duration(band.low)} to {duration(band.high)}."
        )
    ]
    if band.reasons:
        blocks.append(
            Text(
                text=f"The band is wide: {'; '.join(band.reasons)}. A step that you measured makes it "
                "narrower: --known-step-time."
            )
        )
    return blocks


def _step_sections(model: Transformer, machine: Machine, best: Sequence[Prediction]) -> list[Section]:
    """Return the time and the memory of the best plans, and when the ranks of a pipeline compute."""
    labels = [f"{place}: {each.plan.layout}" for place, each in enumerate(best, 1)]
    parts = [each.time.parts for each in best]
    kinds = [{**each.memory.kinds, "margin": each.margin} for each in best]
    every, limit = "Memory of a rank by kind", machine.available
    sections = {
        "Where a step's time goes": time_bars("Step of the first", "A step by part", labels, parts),
        "Memory of a rank": memory_bars("Memory of the first", every, labels, kinds, limit),
    }
    piped = next((each.plan for each in best if each.plan.layout.pipeline > 1), None)
    if piped is not None:
        spans: list[list[Span]] = [[] for _ in range(piped.layout.pipeline)]
        pipeline_bubble(model, piped, pass_seconds(model, piped, machine), spans)
        sections["Pipeline"] = [timeline(f"{piped.layout} with the schedule {piped.schedule}", spans)]
    return [Section(heading=name, blocks=blocks) for name, blocks in sections.items()]


def _tried(tried: Sequence[TriedLayout]) -> list[DocumentBlock]:
    """Return the predicted and the measured time of a step in each layout, and the fastest."""
    rows = [
        (
            each.layout,
            duration(each.predicted),
            "failed" if each.measured is None else duration(each.measured),
            each.problem,
        )
        for each in tried
    ]
    head = ("layout", "predicted", "measured", "")
    blocks: list[DocumentBlock] = [
        Table(caption="Tried", head=head, rows=rows, right=head[2:3], whole=head[:1])
    ]
    if tried and tried[0].measured is not None:
        first, ratio = tried[0].layout, tried[0].measured / tried[0].predicted
        ran = counted(sum(each.measured is not None for each in tried), "layout")
        text = f"{first} is the fastest of {ran} that ran here: {ratio:.2f} times the predicted time."
        blocks.append(Text(text=text))
    return blocks


def _answers(answers: Sequence[WhatIf]) -> Table:
    """Return the fastest layout for each question, compared with that of the search."""
    head = ("change", "fastest layout", "step", "difference")
    rows = []
    for each in answers:
        change = ""
        if each.ratio is not None and each.change is not None and each.part is not None:
            sign = "+" if each.change >= 0 else "-"
            change = f"{each.ratio - 1:+.1%}: {part_name(each.part)} {sign}{duration(abs(each.change))}"
        found = each.best
        layout, step = (
            (str(found.plan.layout), duration(found.step_seconds)) if found else ("none fits", "")
        )
        rows.append((each.question, layout, step, change))
    return Table(caption="What if", head=head, rows=rows, right=head[2:3], whole=head[:2])


def _others(result: SearchResult) -> list[DocumentBlock]:
    """Return why other layouts are not among the fastest."""
    head, caption = ("layout", "why not"), "Others"
    rows = [(str(each.layout), each.reason) for each in result.rejected]
    rest = len(rows) - _OTHERS
    blocks: list[DocumentBlock] = [
        Table(caption=caption, head=head, rows=rows[:_OTHERS], whole=head[:1], only="terminal"),
        Table(caption=caption, head=head, rows=rows, only="page"),
    ]
    more = Text(text=f"--json and --html list {rest} more.", only="terminal")
    return [*blocks, more] if rest > 0 else blocks
