"""The traced steps of a module as text and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, fields
from typing import Any

from rich.console import Console

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.fit import ModuleFit
from shoal.tools.plan.search.module_search import ModuleSearch
from shoal.tools.plan.show.display import bar, plan_values
from shoal.tools.plan.time.traced_time import print_traced_time
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.trace import planned_strategies
from shoal.util.tables import print_line, print_rows
from shoal.util.units import compact, duration, size

_OTHERS = 8


def fit_values(found: Sequence[ModuleFit]) -> dict[str, Any]:
    """Return the fits as plain values, bytes of one rank; the given plan first."""
    return {
        "fits": found[0].fits,
        "available_bytes": found[0].available,
        "best": [traced_values(each) for each in found[:1] if each.fits],
        "tried": [traced_values(each) for each in found],
    }


def search_values(found: ModuleSearch, machine: Machine) -> dict[str, Any]:
    """Return the result of a search as plain values; the fastest plan first."""
    return {
        "machine": machine.name,
        "available_bytes": machine.available,
        "best": [traced_values(each) for each in found.best],
        "rejected": [{"layout": layout, "reason": reason} for layout, reason in found.rejected],
    }


def traced_values(found: ModuleFit) -> dict[str, Any]:
    """Return a traced plan as plain values: bytes of the rank that needs most, seconds."""
    return plan_values(found.plan) | {
        "change": found.change,
        "strategy": strategy_text(found.plan),
        "fits": found.fits,
        "needed_bytes": found.needed,
        "margin_bytes": found.margin,
        "traced_bytes": found.memory.total,
        "pipeline_rank": found.place,
        "memory": asdict(found.memory),
        "rank_bytes": [each.total for each in found.memories],
        "step_seconds": found.step_seconds,
        "parts": found.time.parts,
        "step": asdict(found.time),
        "collectives": {name: asdict(one) for name, one in found.collectives.items()},
    }


def strategy_text(plan: PlannedStep) -> str:
    """Return the traced strategies as they are written in a script, without default options."""
    found = []
    for each in planned_strategies(plan):
        options = ((field, getattr(each, field.name)) for field in fields(each) if field.init)
        given = [f"{field.name}={own!r}" for field, own in options if own != _usual(field)]
        found.append(f"shoal.{type(each).__name__}({', '.join(given)})")
    return found[0] if len(found) == 1 else f"[{', '.join(found)}]"


def _usual(option: Field[Any]) -> Any:
    made = option.default_factory
    return option.default if made is MISSING else made()


_MOMENTS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "update": "update",
    "checks": "checks on the first batch",
}


def memory_kinds(found: ModuleFit) -> dict[str, float]:
    """Return the bytes at the peak by kind, with the loss of the allocator and the margin."""
    lost = found.memory.reserved - found.memory.total
    return {**found.memory.kinds, "fragmentation": lost, "margin": found.margin}


def memory_title(found: ModuleFit) -> str:
    """Return a title with the rank and the moment of its peak."""
    stages = found.plan.layout.pipeline
    rank = f"rank {found.place} of {stages} in the pipeline" if stages > 1 else "a rank"
    return f"Memory of {rank} at its peak, in the {_MOMENTS[found.memory.moment]}"


def rank_rows(found: ModuleFit) -> list[tuple[str, ...]]:
    """Return the memory at the peak and the waiting of each rank of a pipeline as text."""
    return [
        (str(place), size(memory.total), _MOMENTS[memory.moment], duration(run.time.bubble))
        for place, (memory, run) in enumerate(zip(found.memories, found.runs, strict=True))
    ]


RANK_HEAD = ("rank", "traced", "peak in the", "waiting")


def print_fit(console: Console, machine: Machine, found: Sequence[ModuleFit]) -> None:
    """Print the memory of the given plan by kind, its time, and the changes that were tried."""
    first = found[0]
    print_line(console, f"{first.plan.layout} on {machine.name} {first.verdict}.", "")
    _print_plan(console, first)
    if len(found) > 1:
        changes = [(each.change, each.verdict) for each in found[1:]]
        print_rows(console, "Changes", ("change", ""), changes)


def print_search(console: Console, machine: Machine, found: ModuleSearch) -> None:
    """Print the fastest plans, the memory and the time of the first, and the other layouts."""
    if not found.best:
        print_line(console, f"No layout fits {machine.name}, with {size(machine.available)} usable.")
    else:
        heads, rows = search_table(found)
        print_rows(console, f"Fastest on {machine.name}", heads, rows, right=heads[-3:])
        first = found.best[0]
        print_line(console, f"The strategy of the first: {strategy_text(first.plan)}.", "")
        _print_plan(console, first)
    if found.rejected:
        rest = len(found.rejected) - _OTHERS
        print_rows(console, "Others", ("layout", "why not"), found.rejected[:_OTHERS])
        if rest > 0:
            print_line(console, f"--json and --html list {rest} more.")


def search_table(found: ModuleSearch) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the fastest plans; the last three columns are numbers."""
    heads = ("layout", "batches", "recompute", "step", "samples/s", "memory")
    rows: list[tuple[str, ...]] = [
        (
            str(each.plan.layout),
            f"{each.plan.micro_batches} x {each.plan.micro_batch}",
            each.plan.recompute,
            duration(each.step_seconds),
            compact(each.plan.global_batch / each.step_seconds),
            size(each.needed),
        )
        for each in found.best
    ]
    return heads, rows


def _print_plan(console: Console, found: ModuleFit) -> None:
    """Print the memory of a traced plan by kind and by rank, and its time."""
    kinds = memory_kinds(found).items()
    rows = [(kind, size(value), bar(value / found.available)) for kind, value in kinds]
    if found.plan.split_points:
        points = ", ".join(found.plan.split_points)
        print_line(console, f"Rank {found.place} needs most. Stages begin at {points}.", "")
        ranks = rank_rows(found)
        print_rows(console, "Ranks of the pipeline", RANK_HEAD, ranks, right=RANK_HEAD[1:2])
    print_rows(console, memory_title(found), ("kind", "bytes", ""), rows, right=("bytes",))
    print_traced_time(console, found.time, found.collectives)
