"""Whether the traced step of a module fits a machine, its time, and changes with which it fits.

`search_module` traces all layouts, and returns the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.bench.measurement import call_target, import_named
from shoal.tools.bench.scaling.configurations import SIZES, BuiltIn, parse_subject
from shoal.tools.bench.scaling.models import Workload, make_model, workload_of
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.candidates import resolve_layout
from shoal.tools.plan.search.search import Prediction, RejectedLayout, SearchResult
from shoal.tools.plan.time.simulation import (
    collective_totals,
    mean_time,
    run_ranks,
    with_imbalance,
)
from shoal.tools.plan.trace import TracedStep, numbers_of_experts, trace_step
from shoal.tools.plan.work.planned_step import PlannedStep, Recompute
from shoal.util.errors import LaunchError, ShoalError

MARGIN, SHARDED_MARGIN = 0.06, 0.15
"""The parts of the traced memory that a training may need in addition: the largest measured ones."""
_ROUNDS = (4, 2, 1)
"""Micro-batches for each rank of a pipeline, of which the first that divides the batch is traced."""
SMALL_MARGIN = 64_000
"""Bytes that it may need in addition to these."""


def margin_of(layout: Layout) -> float:
    """Return the part of the traced memory that a training in a layout may need in addition.

    With `shard`, buffers of several collectives may live simultaneously.
    """
    return SHARDED_MARGIN if layout.shard > 1 else MARGIN


def named_workload(text: str, batch: int) -> Callable[[], Workload]:
    """Return a function that builds the workload that `--model` identifies.

    It is a built-in model of `shoal bench`, such as `resnet50:`, or a function of the user, as
    `package.module:name` or `path/train.py:name`. `batch` is the number of samples in a global batch.
    """
    if text.partition(":")[0] in SIZES:
        subject = parse_subject(text)
        if isinstance(subject, BuiltIn):
            return lambda: make_model(subject, batch)
    function = import_named(text, "build")

    def workload() -> Workload:
        found = workload_of(call_target(function, text), text)
        made = found.model
        if isinstance(made, nn.Module):
            return found
        return found._replace(model=lambda: _module_of(call_target(made, text), text))

    return workload


def _module_of(made: object, given: str) -> nn.Module:
    """Return the module that a function of a workload has returned; LaunchError for other values."""
    if not isinstance(made, nn.Module):
        raise LaunchError(
            given=given,
            found=f"its first value is a function that returns {type(made).__name__}, not a module",
            fix="return a module, or a function that returns one",
        )
    return made


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
    """Return the plan that options describe.

    Without `micro_batch`, a pipeline has four micro-batches per rank, or two or one if the local batch
    is not divisible by more. Other layouts have one micro-batch.

    Raises ShoalError if the global batch does not divide, or options of a pipeline are given for
    another layout.
    """
    degrees = resolve_layout(layout, devices)
    pipelined = [f"--split-points {','.join(split_points)}"] if split_points else []
    pipelined += [f"--schedule {schedule}"] if schedule != "1f1b" else []
    if pipelined and degrees.pipeline == 1:
        raise ShoalError(
            given=f"{pipelined[0]} --layout {layout}",
            found="the layout has no pipeline",
            fix=f"leave it out, or use --layout pipeline={max(2, devices)}",
        )
    unit = degrees.data_size * (micro_batch or degrees.pipeline)
    if batch % unit:
        asked = "" if micro_batch is None else f" --micro-batch {micro_batch}"
        raise ShoalError(
            given=f"--batch {batch}{asked} --layout {layout} -n {devices}",
            found=f"the global batch must be a multiple of {unit} samples",
            fix=f"use --batch {max(1, round(batch / unit)) * unit}",
        )
    return PlannedStep(
        layout=degrees,
        global_batch=batch,
        micro_batch=micro_batch or _micro_batch(degrees, batch),
        recompute=recompute,
        precision=precision,
        split_points=split_points,
        schedule=schedule,
        stages=SCHEDULES[schedule].stages if degrees.pipeline > 1 else 1,
    )


def _micro_batch(layout: Layout, batch: int) -> int:
    """Return the samples of a micro-batch with which a pipeline has several micro-batches per rank."""
    local = batch // layout.data_size
    rounds = _ROUNDS if layout.pipeline > 1 else (1,)
    return next(local // (n * layout.pipeline) for n in rounds if local % (n * layout.pipeline) == 0)


def trace_pipeline(
    build: Callable[[], Workload],
    plan: PlannedStep,
    machine: Machine,
    *,
    fake: bool = True,
    averaging: bool = True,
    busiest: bool = False,
) -> list[TracedStep]:
    """Return the steps of the ranks of one replica of the pipeline, traced one after another.

    On a GPU, AdamW updates lists of parameters with few kernels (`foreach`), as it does by default. It
    can't if tensor or expert parallelism shards some of them.
    """
    listed = machine.cores is None and plan.layout.tensor == plan.layout.expert == 1
    trace = partial(
        trace_step,
        build,
        plan,
        devices=machine.devices,
        fake=fake,
        averaging=averaging,
        busiest=busiest,
        optimizer=partial(torch.optim.AdamW, foreach=listed),
    )
    return [trace(rank=rank) for rank in plan.layout.group(0, "pipeline")]


def fit_module(
    build: Callable[[], Workload],
    plan: PlannedStep,
    machine: Machine,
    *,
    fake: bool = True,
    layouts: bool = True,
) -> list[Prediction]:
    """Trace a plan, and, if it does not fit, changes of it until one fits.

    With `layouts`, another layout is one of the changes. Raises ShoalError if the module can't be
    traced with the given plan.
    """
    found = [fit_plan(build, plan, machine, fake=fake)]
    if found[0].fits:
        return found
    for change, tried in _changes(plan, layouts=layouts):
        try:
            found.append(fit_plan(build, tried, machine, change, fake=fake))
        except ShoalError:
            continue  # such as activation checkpointing of a model without repeated blocks
        if found[-1].fits:
            break
    return found


def fit_plan(
    build: Callable[[], Workload],
    plan: PlannedStep,
    machine: Machine,
    change: str = "as given",
    *,
    fake: bool = True,
) -> Prediction:
    """Trace one plan. Raises ShoalError if the module can't be traced with it.

    The time of a strategy that averages the parameters in one of several steps is that of the mean
    step; its memory and its collectives are those of a step that averages. Those of experts are of
    equal numbers of tokens, and their time is that of the rank with most.
    """
    steps = trace_pipeline(build, plan, machine, fake=fake)
    place = max(range(len(steps)), key=lambda each: steps[each].memory.reserved)
    step, memory = steps[place], steps[place].memory
    runs = run_ranks([each.segments for each in steps], step.plan, machine)
    if step.every > 1:
        others = trace_pipeline(build, plan, machine, fake=fake, averaging=False)
        rest = run_ranks([each.segments for each in others], step.plan, machine)
        runs = [
            replace(each, time=mean_time(run.time, each.time, step.every))
            for run, each in zip(runs, rest, strict=True)
        ]
    imbalance = max(each.imbalance for each in steps)
    if imbalance > 1:
        others = trace_pipeline(build, plan, machine, fake=fake, busiest=True)
        rest = run_ranks([each.segments for each in others], step.plan, machine)
        runs = [
            replace(each, time=with_imbalance(run.time, each.time))
            for run, each in zip(rest, runs, strict=True)
        ]
    return Prediction(
        plan=step.plan,
        memory=memory,
        time=runs[place].time,
        available=machine.available,
        change=change,
        margin=round(margin_of(plan.layout) * memory.reserved) + SMALL_MARGIN,
        imbalance=imbalance,
        place=place,
        memories=tuple(each.memory for each in steps),
        runs=tuple(runs),
        collectives=collective_totals(step.segments, step.plan, machine),
    )


def _changes(plan: PlannedStep, *, layouts: bool) -> Iterator[tuple[str, PlannedStep]]:
    """Yield changes that need less memory: alone, then together."""
    changes: dict[str, dict[str, Any]] = {}
    if plan.micro_batch > 1:
        changes["--micro-batch 1"] = {"micro_batch": 1}
    if plan.recompute != "full":
        changes["--recompute full"] = {"recompute": "full"}
    if layouts and plan.layout.replicate > 1:
        sharded = replace(plan.layout, shard=plan.layout.shard * plan.layout.replicate, replicate=1)
        changes[f"--layout {sharded}"] = {"layout": sharded}
    for change, values in changes.items():
        yield change, replace(plan, **values)
    if len(changes) > 1:
        together = {name: value for values in changes.values() for name, value in values.items()}
        yield "all of them", replace(plan, **together)


_AXES = ("replicate", "shard", "tensor", "context", "pipeline", "expert")
_INSIDE = ("tensor", "context")
"""Axes that stay within a node."""


def search_module(
    build: Callable[[], Workload],
    devices: int,
    batch: int,
    machine: Machine,
    *,
    micro_batch: int | None = None,
    recompute: Recompute = "none",
    precision: str = "mixed",
    schedule: str = "1f1b",
    fake: bool = True,
    top: int = 5,
    note: Callable[[str], None] = lambda _: None,
) -> SearchResult:
    """Trace a module in all layouts with at most two axes, and return the fastest that fit.

    A layout that does not fit is traced with smaller micro-batches and recomputation too. `note` gets a
    line before each layout. Tensor and context parallelism stay within a node.

    Raises:
        ShoalError: The error of the first layout, if the module can't be traced in any of them.
    """
    layouts = module_layouts(devices, machine, numbers_of_experts(build, fake=fake))
    fits: list[Prediction] = []
    rejected: list[RejectedLayout] = []
    first: ShoalError | None = None
    for number, layout in enumerate(layouts, 1):
        note(f"Tracing {layout} ({number} of {len(layouts)}) …")
        try:
            flow = schedule if layout.pipeline > 1 else "1f1b"
            plan = plan_of(str(layout), devices, batch, micro_batch, recompute, precision, (), flow)
            found = fit_module(build, plan, machine, fake=fake, layouts=False)[-1]
        except ShoalError as error:
            first = first or error
            rejected.append(RejectedLayout(layout=layout, reason=error.found))
            continue
        if found.fits:
            fits.append(found)
        else:
            rejected.append(RejectedLayout(layout=layout, reason=found.verdict))
    if first is not None and not fits and len(rejected) == len(layouts):
        raise first
    fits.sort(key=lambda each: each.order)
    slower = [
        RejectedLayout(layout=each.plan.layout, reason=each.slower_than(fits[0])) for each in fits[top:]
    ]
    return SearchResult(
        best=tuple(fits[:top]),
        rejected=(*slower, *rejected),
        tried=len(layouts),
        fitting=len(fits),
        evaluated=len(layouts),
    )


def module_layouts(devices: int, machine: Machine, experts: Collection[int] = ()) -> list[Layout]:
    """Return the layouts of a number of devices with at most two axes; those with one come first.

    `experts` are the numbers of experts in a layer, which the degree of the expert axis divides.
    """
    single = [Layout(**{axis: devices}) for axis in (_AXES if devices > 1 else _AXES[:1])]
    pairs = [
        Layout(**{first: degree, second: devices // degree})
        for first, second in combinations(_AXES, 2)
        for degree in range(2, devices // 2 + 1)
        if devices % degree == 0
    ]
    return [
        each
        for each in (*single, *pairs)
        if all(each.degree(axis) <= machine.devices for axis in _INSIDE)
        and (each.expert == 1 or (experts and math.gcd(*experts) % each.expert == 0))
    ]
