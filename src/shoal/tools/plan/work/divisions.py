"""Whether the degrees of a layout and the stages of a pipeline divide a transformer."""

from __future__ import annotations

import math

from shoal.distributed.layout import Layout
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.transformer import Transformer
from shoal.util.errors import ShoalError
from shoal.util.units import counted


def degree_problem(model: Transformer, layout: Layout) -> tuple[str, str] | None:
    """Return which degree does not divide what it splits, and what helps; None if all do."""
    if layout.expert > 1 and not model.experts:
        return "the model has no experts", "leave expert out, or use --model …,experts=8,choices=2"
    heads = model.key_heads
    for count, what, axis in (
        (heads, "key and value heads", "tensor"),
        (model.width, "columns of the MLP", "tensor"),
        (model.seq, "tokens of a sample", "context"),
        (heads // layout.tensor, "key and value heads of a rank", "context"),
        (model.experts, "experts", "expert"),
    ):
        degree = layout.degree(axis)
        if count % degree:
            most = math.gcd(count, degree)
            fix = f"use {axis}={most}, and shard=-1 for the other devices"
            return f"{axis}={degree} does not divide {count:,} {what}", fix
    return None


def check_division(model: Transformer, plan: PlannedStep, given: str) -> None:
    """Raise ShoalError for `given` if a step that was taken does not divide this model."""
    found = degree_problem(model, plan.layout)
    ranks, kind = plan.layout.pipeline, SCHEDULES[plan.schedule]
    count = ranks * plan.stages
    if found is None and ranks > 1 and not kind.allows(plan.stages):
        stages = f"{plan.schedule} has {counted(kind.stages, 'stage')} per rank, not {plan.stages}"
        found = stages, f"use stages={kind.stages}, or schedule=interleaved"
    elif found is None and count > model.layers + 1:
        stages = f"pipeline={ranks} has {counted(count, 'stage')} for {counted(model.layers, 'layer')}"
        found = stages, "check that model, layout and stages are those of the step"
    if found is not None:
        raise ShoalError(given=given, found=found[0], fix=found[1])
