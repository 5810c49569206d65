"""Whether the traced step of a module fits a machine, its time, and the changes with which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from shoal.bench.import_target import call_target, import_named
from shoal.bench.scaling.models import Workload, make_model, workload_of
from shoal.bench.scaling.subject import SIZES, BuiltIn, parse_subject
from shoal.distributed.layout import Layout
from shoal.plan.configuration import PlannedStep, Recompute
from shoal.plan.display import bar
from shoal.plan.machines import Machine
from shoal.plan.trace import TracedMemory, TracedStep, trace_step
from shoal.plan.traced_time import (
    CollectiveTotal,
    TracedTime,
    collective_totals,
    pipeline_seconds,
    print_traced_time,
)
from shoal.util.errors import ShoalError
from shoal.util.tables import print_line, print_rows
from shoal.util.units import size

MARGIN, SHARDED_MARGIN = 0.06, 0.15
"""The parts of the traced memory that a training may need in addition: the largest measured ones."""
SMALL_MARGIN = 64_000
"""Bytes that it may need in addition to these."""


def margin_of(layout: Layout) -> float:
    """Return the part of the traced memory that a training in a layout may need in addition.

    With `shard`, buffers of several collectives may live simultaneously.
    """
    return SHARDED_MARGIN if layout.shard > 1 else MARGIN


@dataclass(frozen=True, kw_only=True)
class ModuleFit:
    """The memory of a traced step on a machine. `change` says how its plan differs from the given one.

    `needed` is the memory with the part that torch's allocator loses on a GPU, and the margin. `place`
    is the place in the pipeline of the rank that needs most.
    """

    change: str
    plan: PlannedStep
    memory: TracedMemory
    time: TracedTime
    collectives: Mapping[str, CollectiveTotal]
    available: float
    place: int = 0

    @property
    def margin(self) -> int:
        """Bytes that a training may need in addition to the trace."""
        return round(margin_of(self.plan.layout) * self.memory.reserved) + SMALL_MARGIN

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.memory.reserved + self.margin

    @property
    def fits(self) -> bool:
        """Whether the machine has them."""
        return self.needed <= self.available

    @property
    def verdict(self) -> str:
        """A sentence: whether it fits, and by how much."""
        rest = self.available - self.needed
        of = f"{size(self.needed)} of {size(self.available)}"
        return f"fits: {of}, {size(rest)} free" if self.fits else f"does not fit: {of}"


def named_workload(text: str, batch: int) -> Callable[[], Workload]:
    """Return a function that builds the workload that `--model` identifies.

    It is a built-in model of `shoal bench`, such as `resnet50:`, or a function of the user, as
    `package.module:name` or `path/train.py:name`. `batch` is the number of samples in a global batch.
    """
    if text.partition(":")[0] in SIZES:
        subject = parse_subject(text)
        if isinstance(subject, BuiltIn):
            return lambda: make_model(subject, batch)
    function = import_named(text, "function")
    return lambda: workload_of(call_target(function, text), text)


def plan_of(
    layout: str,
    devices: int,
    batch: int,
    micro_batch: int | None,
    recompute: Recompute,
    precision: str,
    split_points: tuple[str, ...] = (),
    schedule: str = "1f1b",
) -> PlannedStep:
    """Return the plan that options describe. Raises ShoalError if the global batch does not divide."""
    degrees = Layout.parse(layout).resolve(devices)
    local = batch // degrees.data_size
    micro = micro_batch or max(1, local)
    unit = degrees.data_size * micro
    if batch % degrees.data_size or not local or local % micro:
        raise ShoalError(
            given=f"--batch {batch} --micro-batch {micro} --layout {layout} -n {devices}",
            found=f"{degrees.data_size} local batches of whole micro-batches have a multiple of {unit} "
            "samples",
            fix=f"use --batch {max(1, round(batch / unit)) * unit}",
        )
    return PlannedStep(
        layout=degrees,
        global_batch=batch,
        micro_batch=micro,
        recompute=recompute,
        precision=precision,
        split_points=split_points,
        schedule=schedule,
    )


def trace_pipeline(
    build: Callable[[], Workload], plan: PlannedStep, devices: int, *, fake: bool = True
) -> list[TracedStep]:
    """Return the steps of the ranks of one replica of the pipeline, traced one after another."""
    ranks = plan.layout.group(0, "pipeline")
    return [trace_step(build, plan, rank=rank, devices=devices, fake=fake) for rank in ranks]


def fit_module(
    build: Callable[[], Workload], plan: PlannedStep, machine: Machine, *, fake: bool = True
) -> list[ModuleFit]:
    """Trace a plan, and, if it does not fit, changes of it until one fits.

    Raises ShoalError if the module can't be traced with the given plan.
    """

    def fit(change: str, tried: PlannedStep) -> ModuleFit:
        steps = trace_pipeline(build, tried, machine.devices, fake=fake)
        place, step = max(enumerate(steps), key=lambda each: each[1].memory.reserved)
        times = pipeline_seconds([each.segments for each in steps], step.plan, machine)
        return ModuleFit(
            change=change,
            plan=step.plan,
            memory=step.memory,
            time=times[place],
            collectives=collective_totals(step.segments, step.plan, machine),
            available=machine.available,
            place=place,
        )

    found = [fit("as given", plan)]
    if found[0].fits:
        return found
    for change, tried in _changes(plan):
        try:
            found.append(fit(change, tried))
        except ShoalError:
            continue  # such as activation checkpointing of a model without repeated blocks
        if found[-1].fits:
            break
    return found


def _changes(plan: PlannedStep) -> Iterator[tuple[str, PlannedStep]]:
    """Yield changes that need less memory: alone, then together."""
    layout = plan.layout
    smaller = replace(plan, micro_batch=1)
    if plan.micro_batch > 1:
        yield "--micro-batch 1", smaller
    if plan.recompute != "full":
        yield "--recompute full", replace(plan, recompute="full")
    if layout.replicate > 1:
        sharded = replace(layout, shard=layout.data_size, replicate=1)
        yield f"--layout {sharded}", replace(plan, layout=sharded)
        layout = sharded
    yield "all of them", replace(smaller, recompute="full", layout=layout)


def fit_values(found: list[ModuleFit]) -> dict[str, Any]:
    """Return the fits as plain values, bytes of one rank; the given plan first."""
    return {
        "fits": found[0].fits,
        "available_bytes": found[0].available,
        "tried": [
            {
                "change": each.change,
                "layout": str(each.plan.layout),
                "micro_batch": each.plan.micro_batch,
                "recompute": each.plan.recompute,
                "fits": each.fits,
                "needed_bytes": each.needed,
                "margin_bytes": each.margin,
                "traced_bytes": each.memory.total,
                "pipeline_rank": each.place,
                "split_points": each.plan.split_points,
                "memory": asdict(each.memory),
                "step_seconds": each.time.total,
                "step": asdict(each.time),
                "collectives": {name: asdict(one) for name, one in each.collectives.items()},
            }
            for each in found
        ],
    }


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


def print_fit(console: Console, machine: Machine, found: list[ModuleFit]) -> None:
    """Print the memory of the given plan by kind, its time, and the changes that were tried."""
    first = found[0]
    print_line(console, f"{first.plan.layout} on {machine.name} {first.verdict}.", "")
    kinds = memory_kinds(first).items()
    rows = [(kind, size(value), bar(value / first.available)) for kind, value in kinds]
    if first.plan.split_points:
        points = ", ".join(first.plan.split_points)
        print_line(console, f"Rank {first.place} needs most. Stages begin at {points}.", "")
    print_rows(console, memory_title(first), ("kind", "bytes", ""), rows, right=("bytes",))
    print_traced_time(console, first.time, first.collectives)
    if len(found) > 1:
        changes = [(each.change, each.verdict) for each in found[1:]]
        print_rows(console, "Changes", ("change", ""), changes)
