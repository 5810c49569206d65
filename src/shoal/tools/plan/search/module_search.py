"""The fastest layouts of a traced module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.search.fit import fit_module, plan_of
from shoal.tools.plan.search.prediction import Prediction, RejectedLayout, SearchResult
from shoal.tools.plan.work.planned_step import Recompute
from shoal.util.errors import ShoalError

_AXES = ("replicate", "shard", "tensor", "context", "pipeline")
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
    layouts = module_layouts(devices, machine)
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


def module_layouts(devices: int, machine: Machine) -> list[Layout]:
    """Return the layouts of a number of devices with at most two axes; those with one come first."""
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
    ]
