"""Seconds of one optimizer step by part, from the dimensions of a transformer, and their error.

The formulas take one plan, or many at once as arrays, with the least possible bubble of a pipeline. The
bubble of one plan is simulated, action by action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shoal.distributed.pipeline_schedules import PipelineAction, action_lists
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import sharded_parameters, stage_parameters
from shoal.tools.plan.time.rates import (
    ComputeSeconds,
    LayerSeconds,
    compute_seconds,
    expert_seconds,
    layer_collectives,
    step_collectives,
)
from shoal.tools.plan.work.layers import transformer_work
from shoal.tools.plan.work.planned_step import PlannedStep, Quantity
from shoal.tools.plan.work.slowest import busiest_load, slowest
from shoal.tools.plan.work.stage_layers import split_layers, stage_layers
from shoal.tools.plan.work.transformer import Transformer

_PASSES = ("products", "fp8", "convolutions", "attention", "memory", "recompute", "launch")


@dataclass(frozen=True)
class StepParts:
    """Seconds of one optimizer step on some devices by part. They add up to `total`.

    `memory` are element-wise operations and the operands of products, `launch` is the time between
    operations and for the host, `bubble` the waiting for other pipeline stages, `stragglers` that for
    the slowest device, and `data` the gradients and gathered parameters that no computation hides.
    """

    parts: Mapping[str, Quantity]
    devices: int = 1

    @classmethod
    def of(cls, devices: int = 1, **parts: Quantity) -> StepParts:
        """Return numbers, or arrays of several plans, by name."""
        found = {name: one if np.ndim(one) else float(one) for name, one in parts.items()}
        return cls(found, devices)

    @property
    def total(self) -> Quantity:
        """All seconds."""
        return sum(self.parts.values())

    @property
    def measured_parts(self) -> dict[str, float]:
        """The seconds by the parts that a run measures."""
        passes = sum(self.parts.get(name, 0.0) for name in _PASSES)
        optimizer = self.parts["optimizer"]
        return {
            "forward and backward": passes,
            "optimizer": optimizer,
            "communication and waiting": sum(
                value for name, value in self.parts.items() if name not in (*_PASSES, "optimizer")
            ),
        }


class Span(NamedTuple):
    """Seconds of a step in which a rank computes something, such as "forward"."""

    kind: str
    start: float
    end: float


def add_span(spans: list[Span], new: Span) -> None:
    """Add a span, or lengthen the last one if it is of the same kind and nothing lies between."""
    last = spans[-1] if spans else None
    if last is not None and last.kind == new.kind and last.end == new.start:
        spans[-1] = last._replace(end=new.end)
    elif new.end > new.start:
        spans.append(new)


OVERHEAD = 0.10
"""Computation of eager PyTorch beyond that of the formulas, relative to it (0 to 0.2): copies, casts,
gaps. Compiled code and Megatron-LM have none. The median of published steps (`step_errors.toml`)."""

_LAYER = ("piped", "tensor", "context", "expert", "micro", "precision", "recompute")
"""The options on which the seconds of a layer depend."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one layer, and of the output layer (`head`), for one micro-batch.

    `experts` are those of their collectives, and `busiest` what the rank with most tokens adds.
    """

    forward: ComputeSeconds
    backward: ComputeSeconds
    again: Quantity
    tensor: Quantity
    context: Quantity
    experts: Quantity
    busiest: Quantity
    head: ComputeSeconds

    @property
    def computing(self) -> Quantity:
        """Seconds of a layer without collectives."""
        return self.forward.total + self.backward.total + self.again

    @property
    def total(self) -> Quantity:
        """All seconds of a layer."""
        return self.computing + self.waiting

    @property
    def waiting(self) -> Quantity:
        """Seconds of the collectives of a layer, with those until the busiest rank calls them."""
        return self.tensor + self.context + self.experts + self.busiest

    @property
    def forward_total(self) -> Quantity:
        """Seconds of the forward pass of a layer with its collectives."""
        return self.forward.total + self.waiting / 3


def pass_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> PassSeconds:
    """Return the seconds of one micro-batch."""

    def seconds(plan: PlannedStep) -> PassSeconds:
        work = transformer_work(model, plan, machine.units)
        parts = (work.forward, work.backward, work.recompute, work.head, work.table, work.experts)
        forward, backward, again, head, table, products, *weights = (
            compute_seconds(each, plan, machine) for each in (*parts, *work.overlapped)
        )
        totals = [each.total for each in weights]
        tensor, context = layer_collectives(model, plan, machine, totals)
        experts = expert_seconds(model, plan, machine)
        busiest = (_load(model, plan) - 1) * (products.total + experts)
        head += table
        return PassSeconds(forward, backward, again.total, tensor, context, experts, busiest, head)

    return plan.tabulate(_LAYER, seconds)


def _load(model: Transformer, plan: PlannedStep) -> Quantity:
    """Return the tokens of the busiest rank's experts relative to the mean, with random routers."""
    if not model.experts:
        return 1.0
    load = np.vectorize(busiest_load, otypes=[np.float64])
    return load(plan.tokens(model.seq), model.choices, model.experts, plan.layout.expert)


def estimate_step(model: Transformer, plan: PlannedStep, machine: Machine) -> StepParts:
    """Return the predicted time of one optimizer step of a valid configuration.

    A pipeline is simulated.
    """
    each = pass_seconds(model, plan, machine)
    step = bound_step(model, plan, machine, each)
    if plan.layout.pipeline == 1:
        return step
    return replace(step, parts={**step.parts, "bubble": pipeline_bubble(model, plan, each)})


def bound_step(
    model: Transformer, plan: PlannedStep, machine: Machine, each: PassSeconds | None = None
) -> StepParts:
    """Return the least possible time of one optimizer step of a valid configuration, or of many.

    In a pipeline, the busiest rank computes without pause between its first and last micro-batch, for
    which it waits. `each` are the seconds of a micro-batch, if they are known.
    """
    each = each or pass_seconds(model, plan, machine)
    split, count, numbers = split_layers(model, plan), plan.micro_batches, plan.numbers
    layers = split.busiest
    passes = (each.forward + each.backward) * (layers * count) + each.head * (split.head * count)
    again = layers * count * each.again
    filling = np.where(plan.splits, each.forward_total, each.total)
    parameters = stage_parameters(model, plan)
    after = each.total - each.forward_total
    layer = LayerSeconds(each.forward_total, after, each.backward.total)
    sends, data = step_collectives(model, plan, machine, parameters, layer)
    # Clipping and Adam read every number and write most of them.
    updated = 2 * numbers.parameter + 3 * numbers.gradient + 2 * numbers.state
    bandwidth = machine.efficiency.memory * machine.memory_bandwidth
    spread = machine.efficiency.spread * slowest(plan.layout.size)
    overhead = OVERHEAD if plan.eager and not machine.is_cpu else 0.0
    routed = {"experts": each.experts, "imbalance": each.busiest} if model.experts else {}
    return StepParts.of(
        plan.layout.size,
        products=passes.products,
        fp8=passes.fp8,
        attention=passes.attention,
        memory=passes.memory,
        recompute=again,
        launch=passes.launch + passes.host + machine.efficiency.step,
        tensor=layers * count * each.tensor,
        context=layers * count * each.context,
        bubble=split.earlier * filling,
        pipeline=sends,
        data=data,
        optimizer=sharded_parameters(model, plan) * updated / bandwidth,
        stragglers=spread * (passes.total + again),
        overhead=overhead * (passes.total + again),
        **{name: layers * count * seconds for name, seconds in routed.items()},
    )


_ROUNDS = 6
"""Rounds of as many micro-batches as ranks that are simulated. Each further one takes the time that the
busiest rank computes. For folded schedules, the step is up to 0.5 % too long."""

ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}


def pipeline_bubble(
    model: Transformer,
    plan: PlannedStep,
    layer: PassSeconds,
    spans: Sequence[list[Span]] | None = None,
) -> float:
    """Return the seconds for which the busiest rank waits, as the schedule lets it.

    Each layer takes the seconds of `layer`. Messages take no time here. `spans` are empty lists, one
    for each rank, to which its actions are added. Raises ShoalError if the schedule does not support
    the micro-batches.
    """
    ranks, count, head = plan.layout.pipeline, plan.micro_batches, float(layer.head.total)
    backward = layer.total - layer.forward_total
    weights = (layer.backward.products + layer.backward.fp8) / 2
    each = {"F": layer.forward_total, "B": backward, "I": backward - weights, "W": weights}
    durations = [
        {kind: layers * seconds for kind, seconds in each.items()}
        for layers in stage_layers(model, plan)
    ]
    # The output layer has one product in forward and two in backward.
    parts = {"F": 1, "B": 2, "I": 1, "W": 1}
    durations[-1] = {kind: own + parts[kind] * head / 3 for kind, own in durations[-1].items()}
    rounds = count // ranks
    simulated = count if rounds <= _ROUNDS else _ROUNDS * (count // rounds)
    orders = action_lists(plan.schedule, ranks, plan.stages, simulated)
    seconds = simulate_actions(orders, durations, spans)
    computed = [sum(durations[stage][kind] for kind, stage, _ in order) for order in orders]
    split = split_layers(model, plan)
    busiest = count * (split.busiest * layer.total + split.head * head)
    return float(max(0.0, seconds + (count / simulated - 1) * max(computed) - busiest))


def simulate_actions(
    orders: Sequence[Sequence[PipelineAction]],
    seconds: Sequence[Mapping[str, float]],
    spans: Sequence[list[Span]] | None = None,
) -> float:
    """Return the seconds of a step.

    Each rank takes its actions in order, each as soon as those that it needs have ended. `seconds` are
    those of each kind of action, for each stage. The actions of each rank are added to `spans`.
    """
    last = len(seconds) - 1
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    advanced = True
    while advanced:
        advanced = False
        for rank, order in enumerate(orders):
            now, place = clocks[rank], places[rank]
            while place < len(order):
                kind, stage, micro = order[place]
                ready: float | None = 0.0
                if kind == "F" and stage:
                    ready = forward.get((stage - 1, micro))
                elif kind in "BI" and stage < last:
                    ready = backward.get((stage + 1, micro))
                if ready is None:
                    break
                began = max(now, ready)
                now = began + seconds[stage][kind]
                if spans is not None:
                    spans[rank].append(Span(ACTIONS[kind], began, now))
                if kind == "F":
                    forward[stage, micro] = now
                elif kind != "W":
                    backward[stage, micro] = now
                place += 1
                advanced = True
            clocks[rank], places[rank] = now, place
    return max(clocks)
