"""The stages of a traced pipeline: where the model is split, and the tensors between the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.data.micro import MicroBatch
from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.distributed.world import World
from shoal.strategies.partition.inputs import Inputs, by_name
from shoal.strategies.partition.own_stages import DrawCounts
from shoal.strategies.partition.stages import OuterGraph, balanced, opened_by, trace
from shoal.strategies.pipeline.flow import Forms, StageFlow
from shoal.strategies.pipeline.options import wide
from shoal.strategies.pipeline.stage import StageModule
from shoal.strategies.random_draws import draws
from shoal.strategies.task import Task
from shoal.tools.plan.work.planned_step import PlannedStep, Work
from shoal.tools.plan.work.traced_work import TracedWork
from shoal.util.errors import ShoalError


def split_points(model: nn.Module, plan: PlannedStep, task: Task, micro: MicroBatch) -> tuple[str, ...]:
    """Return the split points of a plan, or those with which the stages have equal FLOPs.

    Raises ShoalError if the model has fewer parts than stages.
    """
    if plan.split_points:
        return plan.split_points
    outer = trace(model, wide(model))
    inputs = _inputs(outer, model, task, micro)
    names = [str(node.target) if node.op == "call_module" else None for node in outer.graph.nodes]
    count = plan.layout.pipeline * SCHEDULES[plan.schedule].stages
    try:
        return tuple(balanced(list(zip(names, _flops(outer, inputs), strict=True)), count))
    except ValueError as error:
        raise ShoalError(
            given=f"--layout {plan.layout} --schedule {plan.schedule}",
            found=f"{error}: {', '.join(outer.calls())}",
            fix="use a smaller degree of the pipeline axis, or a model with more parts",
        ) from None


@torch.no_grad()
def stage_forms(
    model: nn.Module,
    points: Sequence[str],
    world: World,
    task: Task,
    micro: MicroBatch,
    autocast: torch.dtype | None,
) -> Forms:
    """Return the shapes and dtypes of the tensors between stages, from all of them on this rank."""
    outer = trace(model, opened_by(points))
    stages = outer.cut(points, f"--split-points {','.join(points)}")
    draws.register(model, split=False)
    counts = DrawCounts(stages, world.device)
    parts = {
        number: StageModule(stage, world, counts, last=number == len(stages) - 1)
        for number, stage in enumerate(stages)
    }
    for part in parts.values():
        part.autocast = autocast
    here = world.layout.coordinate(world.rank, "pipeline")
    flow = StageFlow(type(model).__name__, world, parts, [here] * len(stages))
    return flow.run(_inputs(outer, model, task, micro), None)[1]


def _inputs(outer: OuterGraph, model: nn.Module, task: Task, micro: MicroBatch) -> Inputs:
    return by_name(outer.signature, *task.arguments(micro, 0), type(model).__name__)


@torch.no_grad()
def _flops(outer: OuterGraph, inputs: Inputs) -> list[float]:
    """Return the FLOPs of each node of the forward pass."""
    found: list[float] = []

    class Counting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with TracedWork(lambda: "forward") as counted:
                result = super().run_node(n)
            work = sum((segment.work for segment in counted.segments), Work())
            found.append(work.products + work.attention + work.convolutions)
            return result

    Counting(fx.GraphModule(outer.model, outer.graph)).run(*inputs.values())
    return found
