"""All configurations that Shoal can run for a model on a number of devices, as columns of integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.distributed.layout import AXES, Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.work.divisions import degree_problem
from shoal.tools.plan.work.planned_step import (
    ANY_PRECISION,
    FORMATS,
    RECOMPUTES,
    NumberFormat,
    PlannedStep,
    Recompute,
    Values,
)
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError

Integers = npt.NDArray[np.int64]

STAGES = (2, 4, 8)
"""Stages per rank that are tried with schedules that allow any number."""
_RESIDENT = 3
"""Stages per rank whose gathered parameters torch keeps at once. It would gather those of more stages
again and again."""
_PRECISIONS, _SCHEDULES = tuple(FORMATS), tuple(SCHEDULES)
_COLUMNS = (*AXES, "micro", "recompute", "precision", "schedule", "stages", "reshard", "sharded")


@dataclass(frozen=True, kw_only=True)
class FixedOptions:
    """The options that all configurations of a search have; it tries all values of those with None.

    `layout` may have a degree of -1, and `precision` may be ANY_PRECISION.
    """

    layout: str | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    precision: str = "mixed"
    schedule: str | None = None
    stages: int | None = None


MIXED = FixedOptions()
"""The options of a search that tries all values, in mixed precision."""


class Candidates(PlannedStep):
    """Many plans, one for each row of `rows`: each of their options is an array."""

    rows: Integers
    columns: dict[str, Integers]

    def __init__(self, rows: Integers, batch: int) -> None:
        columns = dict(zip(_COLUMNS, rows.T, strict=True))
        degrees = {axis: columns[axis] for axis in AXES}
        size = int(np.prod(rows[0, : len(AXES)])) if len(rows) else 1
        schedules, formats = [*SCHEDULES.values()], [*FORMATS.values()]

        def named(names: Sequence[str], column: str) -> Any:
            return np.array(names)[columns[column]]

        def known(values: Sequence[object], name: str, column: str) -> Any:
            return np.array([getattr(each, name) for each in values])[columns[column]]

        vars(self).update(
            rows=rows,
            columns=columns | {"piped": (columns["pipeline"] > 1).astype(np.int64)},
            layout=SimpleNamespace(size=size, **degrees),
            global_batch=batch,
            micro_batch=columns["micro"],
            stages=columns["stages"],
            # Stages send each other full activations.
            sequence_parallel=(columns["tensor"] > 1) & (columns["pipeline"] == 1),
            reshard_after_forward=columns["reshard"],
            recompute=named(RECOMPUTES, "recompute"),
            schedule=named(_SCHEDULES, "schedule"),
            accumulate=named(("whole", "sharded"), "sharded"),
            folded=known(schedules, "folded", "schedule"),
            splits=known(schedules, "splits", "schedule"),
            numbers=SimpleNamespace(
                **{each.name: known(formats, each.name, "precision") for each in fields(NumberFormat)}
            ),
        )

    def plan(self, number: int) -> PlannedStep:
        """Return the configuration of a row."""
        each = dict(zip(_COLUMNS, self.rows[number].tolist(), strict=True))
        return PlannedStep(
            layout=Layout(**{axis: each[axis] for axis in AXES}),
            global_batch=self.global_batch,
            micro_batch=each["micro"],
            recompute=RECOMPUTES[each["recompute"]],
            precision=_PRECISIONS[each["precision"]],
            sequence_parallel=each["tensor"] > 1 and each["pipeline"] == 1,
            stages=each["stages"],
            schedule=_SCHEDULES[each["schedule"]],
            reshard_after_forward=bool(each["reshard"]),
            accumulate="sharded" if each["sharded"] else "whole",
        )

    def where(self, chosen: npt.NDArray[np.bool_] | Integers) -> Candidates:
        """Return some of the configurations."""
        return Candidates(self.rows[chosen], self.global_batch)

    @property
    def families(self) -> Integers:
        """The axes in use by each configuration, as the bits of a number."""
        used = self.rows[:, : len(AXES)] > 1
        found: Integers = used @ (1 << np.arange(len(AXES)))
        return found

    def tabulate(self, columns: Sequence[str], function: Callable[[PlannedStep], Values]) -> Values:
        """Return a function of these columns, which is computed once for each combination."""
        key = np.zeros(len(self.rows), np.int64)
        for name in columns:
            values = self.columns[name]
            key = key * (values.max(initial=0) + 1) + values
        _, first, places = np.unique(key, return_index=True, return_inverse=True)
        found: Values = _expanded(function(self.where(first)), places)
        return found


def _expanded(value: Any, places: Integers) -> Any:
    """Return a dataclass of arrays, each with the values at these places."""
    if isinstance(value, np.ndarray):
        return value[places]
    if not is_dataclass(value):
        return value
    return replace(value, **{name: _expanded(own, places) for name, own in vars(value).items()})  # type: ignore[type-var]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def valid_layouts(model: Transformer, machine: Machine, devices: int, batch: int) -> Iterator[Layout]:
    """Yield the layouts that the model, the node and the global batch allow.

    Tensor and context parallelism stay within a node; each stage but the last has a layer.
    """
    node = math.gcd(min(machine.devices, devices), devices)
    for tensor in divisors(node):
        for context in divisors(node // tensor):
            rest = devices // (tensor * context)
            for pipeline in divisors(rest):
                for expert, shard in _data_degrees(model, rest // pipeline):
                    layout = Layout(
                        tensor=tensor,
                        context=context,
                        pipeline=pipeline,
                        expert=expert,
                        shard=shard,
                        replicate=rest // pipeline // expert // shard,
                    )
                    if layout_problem(model, layout, batch) is None:
                        yield layout


def _data_degrees(model: Transformer, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the degrees of the expert and the shard axis for a number of data-parallel ranks."""
    for expert in divisors(math.gcd(model.experts, ranks)) if model.experts else (1,):
        for shard in divisors(ranks // expert):
            yield expert, shard


def layout_problem(model: Transformer, layout: Layout, batch: int) -> tuple[str, str] | None:
    """Return why a model can't be trained in a layout, and what helps; None if it can."""
    if layout.tensor > 1 and model.experts:
        found = "tensor parallelism leaves experts whole"
        return found, "use the expert axis, or trace your module: --model train.py:build"
    if layout.pipeline > 1 and layout.context > 1:
        return "Shoal does not combine a pipeline and context parallelism", "use one of the two axes"
    problem = degree_problem(model, layout)
    if problem is not None:
        return problem
    each = 1 + model.tied  # with one table, the first and the last stage are on one rank
    most = (model.layers + 1) // each
    if 1 < layout.pipeline > most:
        found = (
            f"pipeline={layout.pipeline} has {each * layout.pipeline} stages for {model.layers} layers"
        )
        found += " (with tied=1, a rank has two stages)" if model.tied else ""
        ranks = max(degree for degree in divisors(layout.pipeline) if degree <= most)
        return found, f"use pipeline={ranks}, and shard=-1 for the other devices"
    if batch % layout.data_size:
        nearest = max(1, round(batch / layout.data_size)) * layout.data_size
        found = f"its {layout.data_size:,} data-parallel ranks do not divide {batch:,} samples"
        return found, f"use --batch {nearest}"
    return None


def resolve_layout(text: str, devices: int) -> Layout:
    """Return the layout of an option on a number of devices; raise ShoalError for another number."""
    try:
        return Layout.parse(text).resolve(devices)
    except ShoalError as error:
        better = f"{text},replicate=-1"
        try:
            Layout.parse(better).resolve(devices)
        except ShoalError:
            better = "replicate=-1"
        raise ShoalError(
            given=f"--layout {text} -n {devices}",
            found=error.found,
            fix=f"use a layout of as many devices, such as --layout {better}",
        ) from None


def _fixed_layout(model: Transformer, text: str, devices: int, batch: int) -> Layout:
    layout = resolve_layout(text, devices)
    problem = layout_problem(model, layout, batch)
    if problem is not None:
        raise ShoalError(given=f"--layout {text} -n {devices}", found=problem[0], fix=problem[1])
    return layout


def find_candidates(
    model: Transformer,
    machine: Machine,
    devices: int,
    batch: int,
    fixed: FixedOptions = MIXED,
) -> Candidates:
    """Return all configurations that Shoal can run. There is none if no layout is valid, or if no
    pipeline has the fixed schedule or stages.

    Raises ShoalError for a fixed layout that is not valid, and for FP8 on a machine without it.
    """
    machine.check_precision(fixed.precision)
    formats = [
        number
        for number, each in enumerate(_PRECISIONS)
        if fixed.precision in (each, ANY_PRECISION) and (machine.fp8 or not FORMATS[each].fp8)
    ]

    @cache
    def choices(local: int, pipeline: int, sharded: bool) -> Integers:
        return np.array(list(_choices(model, local, pipeline, sharded, fixed, formats)), np.int64)

    layouts: Iterable[Layout] = valid_layouts(model, machine, devices, batch)
    if fixed.layout is not None:
        layouts = [_fixed_layout(model, fixed.layout, devices, batch)]
    blocks = [np.empty((0, len(_COLUMNS)), np.int64)]
    for layout in layouts:
        found = choices(batch // layout.data_size, layout.pipeline, layout.shard > 1)
        if len(found):
            degrees = np.array([layout.degree(axis) for axis in AXES])
            blocks.append(np.hstack((np.broadcast_to(degrees, (len(found), len(AXES))), found)))
    every = Candidates(np.concatenate(blocks), batch)
    unused = (fixed.schedule or fixed.stages) and not every.columns["piped"].any()
    return Candidates(blocks[0], batch) if unused else every


def _choices(
    model: Transformer,
    local: int,
    pipeline: int,
    sharded: bool,
    fixed: FixedOptions,
    formats: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yield the columns of all configurations of one layout after its degrees."""
    for micro in divisors(local):
        if fixed.micro_batch not in (None, micro):
            continue
        count = local // micro
        for schedule, stages in _flows(model, pipeline, sharded, count, fixed):
            recomputes = [
                number
                for number, each in enumerate(RECOMPUTES)
                # A backward pass in two parts can't recompute. Fused attention stores no scores that
                # selective recomputation could save.
                if (each == "none" or not SCHEDULES[schedule].splits)
                and (fixed.recompute or each) == each
                and (fixed.recompute or each[0] != "s" or not model.flash)
            ]
            free = sharded and pipeline == 1
            reshard = (1, 0) if free else (1,)
            gradients = (1, 0) if free and count > 1 else (1,)
            flow = (_SCHEDULES.index(schedule), stages)
            for recompute, number, *rest in product(recomputes, formats, reshard, gradients):
                yield (micro, recompute, number, *flow, *rest)


def _flows(
    model: Transformer, pipeline: int, sharded: bool, count: int, fixed: FixedOptions
) -> Iterator[tuple[str, int]]:
    """Yield the schedules of a pipeline with their stages per rank, or those that are fixed."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for name, kind in SCHEDULES.items():
        if fixed.schedule not in (None, name) or (model.tied and not kind.folded):
            continue  # if tied and not folded, the embedding and the output layer are on two ranks
        tried = STAGES if fixed.stages is None else (fixed.stages,)
        for stages in tried if fixed.stages or not kind.fixed else (kind.stages,):
            crowded = sharded and stages > _RESIDENT
            supported = _supports(name, pipeline, count, every=fixed.schedule is not None)
            enough = pipeline * stages <= model.layers + 1
            if kind.allows(stages) and enough and not crowded and supported:
                yield name, stages


def _supports(schedule: str, ranks: int, count: int, *, every: bool) -> bool:
    """Return whether a schedule supports a number of micro-batches.

    Without `every`, also whether it may be the best one for it.
    """
    uneven = count % max(1, count // ranks) > 0
    if schedule == "gpipe":
        return every or count < ranks  # else "1f1b" takes the same time with less memory
    if schedule == "looped":
        return every or uneven  # else "interleaved" takes the same time with less memory
    if schedule == "zbv":
        return True
    return (
        not uneven
        if schedule in ("interleaved", "zero-bubble")
        else count
        >= {
            "1f1b": ranks,
            "dualpipev": 2 * ranks,
        }[schedule]
    )
