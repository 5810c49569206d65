"""The traced steps of a module as sections of a document."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.tools.plan.search.prediction import Prediction
from shoal.tools.plan.show.parts import memory_bars, time_bars, timeline
from shoal.util.document import DocumentBlock, Section, Table, Text
from shoal.util.units import duration, size

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
    blocks: list[DocumentBlock] = [
        Text(text=f"A step takes {duration(first.step_seconds)}."),
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
