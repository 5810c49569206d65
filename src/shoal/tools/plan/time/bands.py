"""How far measured steps are from predicted ones, by the kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shoal.tools.plan.time.seconds import StepParts
from shoal.tools.plan.work.planned_step import PlannedStep

StepKind = Literal["compute", "sharded", "communication", "host"]

_HOST, _COMMUNICATION = 0.1, 0.15
"""The part of a step above which it counts as one that waits for the host, or communicates."""

BANDS: Mapping[StepKind, tuple[float, float]] = {
    "compute": (0.96, 1.11),
    "sharded": (1.06, 1.17),
    "communication": (0.97, 1.19),
    "host": (0.98, 1.56),
}
"""Measured time / predicted time of 80 % of published steps (benchmarks/plan_accuracy.py)."""


def step_kind(plan: PlannedStep, step: StepParts) -> StepKind:
    """Return what most of the error of a step depends on: the host, FSDP, communication, computing."""
    if step.parts["launch"] > _HOST * step.total:
        return "host"
    if plan.layout.shard > 1:
        return "sharded"
    between = sum(step.parts[name] for name in ("tensor", "context", "bubble", "pipeline", "data"))
    return "communication" if between > _COMMUNICATION * step.total else "compute"


def step_band(plan: PlannedStep, step: StepParts) -> tuple[float, float]:
    """Return the seconds between which 80 % of the measurements of such steps are."""
    low, high = BANDS[step_kind(plan, step)]
    return low * step.total, high * step.total
