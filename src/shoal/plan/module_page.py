"""The memory and the step time of a traced module as an HTML page, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from shoal.plan.display import part_name
from shoal.plan.fit import ModuleFit, memory_kinds, memory_title
from shoal.plan.machines import Machine
from shoal.plan.page import bars_figure
from shoal.plan.traced_time import COLLECTIVES_HEAD, collective_rows
from shoal.report.html import Block, KeyNumbers, Page, Section, Table, Text
from shoal.util.units import duration, size


def module_page(model: str, machine: Machine, found: Sequence[ModuleFit]) -> Page:
    """Return the page of a traced module: memory and time of the plan, and of changes if it did not
    fit."""
    first = found[0]
    labels = [str(first.plan.layout), *(each.change for each in found[1:])]
    memory: list[Block] = [
        bars_figure(
            "memory",
            f"{memory_title(first)}, by kind.",
            labels,
            [memory_kinds(each) for each in found],
            1e-6,
            "MB",
            limit=first.available,
        )
    ]
    if first.plan.split_points:
        memory.append(Text(text=f"Stages begin at {', '.join(first.plan.split_points)}."))
    parts = [{part_name(name): value for name, value in asdict(each.time).items()} for each in found]
    step: list[Block] = [
        bars_figure(
            "step", "Predicted milliseconds of a step by part.", labels, parts, 1e3, "milliseconds"
        )
    ]
    if rows := collective_rows(first.collectives):
        step.append(
            Table(
                caption="Collectives of a step, if nothing else runs.",
                head=COLLECTIVES_HEAD,
                rows=rows,
                right=COLLECTIVES_HEAD[1:],
            )
        )
    numbers = KeyNumbers(pairs=[("needed", size(first.needed)), ("step", duration(first.time.total))])
    sections = [
        Section(heading="Memory", blocks=[numbers, *memory]),
        Section(heading="Where a step's time goes", blocks=step),
    ]
    if len(found) > 1:
        changes = [(each.change, each.verdict) for each in found[1:]]
        table = Table(caption="Changes that need less memory.", head=("change", ""), rows=changes)
        sections.append(Section(heading="Changes", blocks=[table]))
    return Page(
        title=f"{model} on {machine.name}",
        verdict=f"{first.plan.layout} {first.verdict}.",
        about="shoal plan, traced on tensors without values",
        sections=sections,
    )
