"""The memory and the step time of a traced module as HTML pages, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.fit import ModuleFit
from shoal.tools.plan.search.module_search import ModuleSearch
from shoal.tools.plan.show.display import part_name
from shoal.tools.plan.show.module_display import (
    RANK_HEAD,
    memory_kinds,
    memory_title,
    rank_rows,
    search_table,
    strategy_text,
)
from shoal.tools.plan.show.page import bars_figure, timeline_figure, training_blocks
from shoal.tools.plan.time.traced_time import COLLECTIVES_HEAD, collective_rows
from shoal.tools.plan.training.whole_training import TrainingEstimate
from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.units import duration, size

_ABOUT = "shoal plan, traced on tensors without values"


def module_page(
    model: str, machine: Machine, found: Sequence[ModuleFit], whole: Sequence[TrainingEstimate] = ()
) -> Document:
    """Return the page of a traced module: memory and time of the plan, and of changes if it did not
    fit."""
    first = found[0]
    labels = [str(first.plan.layout), *(each.change for each in found[1:])]
    sections = _sections(labels, found)
    if len(found) > 1:
        changes = [(each.change, each.verdict) for each in found[1:]]
        table = Table(caption="Changes that need less memory.", head=("change", ""), rows=changes)
        sections.append(Section(heading="Changes", blocks=[table]))
    if whole:
        sections.append(Section(heading="Whole training", blocks=training_blocks(found, whole)))
    return Document(
        title=f"{model} on {machine.name}",
        verdict=f"{first.plan.layout} {first.verdict}.",
        about=_ABOUT,
        sections=sections,
    )


def search_page(
    model: str, machine: Machine, found: ModuleSearch, whole: Sequence[TrainingEstimate] = ()
) -> Document:
    """Return the page of a search: the fastest layouts of a module, and why others are not there."""
    sections, verdict = [], f"No layout fits: {size(machine.available)} are usable."
    if found.best:
        first = found.best[0]
        verdict = f"{first.plan.layout} is the fastest: {duration(first.step_seconds)} per step."
        head, rows = search_table(found)
        table = Table(caption="The fastest layouts that fit.", head=head, rows=rows, right=head[-3:])
        text = Text(text=f"The strategy of the first: {strategy_text(first.plan)}.")
        labels = [f"{place}: {each.plan.layout}" for place, each in enumerate(found.best, 1)]
        sections += [Section(heading="Fastest", blocks=[text, table]), *_sections(labels, found.best)]
    if whole:
        blocks = training_blocks(found.best, whole)
        sections.append(Section(heading="Whole training", blocks=blocks))
    if found.rejected:
        others = Table(caption="Other layouts.", head=("layout", "why not"), rows=found.rejected)
        sections.append(Section(heading="Others", blocks=[others]))
    return Document(
        title=f"{model} on {machine.name}", verdict=verdict, about=_ABOUT, sections=sections
    )


def _sections(labels: Sequence[str], found: Sequence[ModuleFit]) -> list[Section]:
    """Return the memory and the time of plans, and of the first in detail."""
    first = found[0]
    memory: list[DocumentBlock] = [
        KeyNumbers(pairs=[("needed", size(first.needed)), ("step", duration(first.step_seconds))]),
        bars_figure(
            "memory",
            f"{memory_title(first)}, by kind.",
            labels,
            [memory_kinds(each) for each in found],
            1e-6,
            "MB",
            limit=first.available,
        ),
    ]
    if first.plan.split_points:
        memory += _stages(first)
    parts = [{part_name(name): value for name, value in asdict(each.time).items()} for each in found]
    caption = "Predicted milliseconds of a step by part."
    step: list[DocumentBlock] = [bars_figure("step", caption, labels, parts, 1e3, "milliseconds")]
    if first.plan.split_points:
        text = f"{first.plan.layout}: when each rank computes what. In the gaps, it waits."
        step.append(timeline_figure(text, [each.spans for each in first.runs]))
    if rows := collective_rows(first.collectives):
        step.append(
            Table(
                caption="Collectives of a step, if nothing else runs.",
                head=COLLECTIVES_HEAD,
                rows=rows,
                right=COLLECTIVES_HEAD[1:],
            )
        )
    return [
        Section(heading="Memory", blocks=memory),
        Section(heading="Where a step's time goes", blocks=step),
    ]


def _stages(found: ModuleFit) -> list[DocumentBlock]:
    """Return the memory of each rank of a pipeline, and where its stages begin."""
    figure = bars_figure(
        "ranks",
        "Traced memory of each rank of the pipeline, by kind.",
        [f"rank {place}" for place in range(len(found.memories))],
        [each.kinds for each in found.memories],
        1e-6,
        "MB",
        limit=found.available,
    )
    table = Table(
        caption="Ranks of the pipeline.", head=RANK_HEAD, rows=rank_rows(found), right=RANK_HEAD[1:2]
    )
    return [
        Text(text=f"Stages begin at {', '.join(found.plan.split_points)}."),
        figure,
        table,
    ]
