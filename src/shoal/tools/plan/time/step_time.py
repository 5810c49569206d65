"""Seconds of one optimizer step by part, from the dimensions of a transformer.

The formulas take one plan, or many at once as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import stage_parameters
from shoal.tools.plan.time.collectives import collective_seconds
from shoal.tools.plan.time.rates import ComputeSeconds, compute_seconds
from shoal.tools.plan.time.seconds import StepParts
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.layers import (
    head_work,
    layer_products,
    layer_work,
    product_work,
    table_work,
)
from shoal.tools.plan.work.quantities import Quantity, choose, larger, smaller
from shoal.tools.plan.work.segments import RankGroup
from shoal.tools.plan.work.transformer import Transformer

CONTENTION = 0.2
"""The part of a device that collectives take from the computation that they overlap: about 20 of the
108 multiprocessors of an A100 run NCCL's channels."""
BUCKET = 25e6
"""Bytes of the last bucket of gradients, which no computation hides."""
_LAYER = ("piped", "tensor", "context", "micro", "precision", "recompute")
"""The options on which the seconds of a layer depend."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one layer, and of the output layer (`head`), for one micro-batch."""

    forward: ComputeSeconds
    backward: ComputeSeconds
    again: Quantity
    tensor: Quantity
    context: Quantity
    head: ComputeSeconds

    @property
    def computing(self) -> Quantity:
        """Seconds of a layer without collectives."""
        return self.forward.total + self.backward.total + self.again

    @property
    def total(self) -> Quantity:
        """All seconds of a layer."""
        return self.computing + self.tensor + self.context

    @property
    def forward_total(self) -> Quantity:
        """Seconds of the forward pass of a layer with its collectives."""
        return self.forward.total + (self.tensor + self.context) / 3


def pass_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> PassSeconds:
    """Return the seconds of one micro-batch."""

    def seconds(plan: PlannedStep) -> PassSeconds:
        work = layer_work(model, plan, machine.units)
        head = compute_seconds(head_work(model, plan, machine.units), plan, machine)
        return PassSeconds(
            forward=compute_seconds(work.forward, plan, machine),
            backward=compute_seconds(work.backward, plan, machine),
            again=compute_seconds(work.recompute, plan, machine).total,
            tensor=_tensor_seconds(model, plan, machine),
            context=_context_seconds(model, plan, machine),
            head=head + compute_seconds(table_work(model, plan), plan, machine),
        )

    return plan.tabulate(_LAYER, seconds)


def estimate_step(model: Transformer, plan: PlannedStep, machine: Machine) -> StepParts:
    """Return the predicted time of one optimizer step of a valid configuration.

    The last stage computes without pause between its first and last micro-batch: its layers, and the
    output layer. The others add the time in which it waits for its first one. For schedules that split
    the backward pass, this is the least possible time.
    """
    layers, count = model.layers / plan.layout.pipeline, plan.micro_batches
    each = pass_seconds(model, plan, machine)
    passes = (each.forward + each.backward) * (layers * count) + each.head * count
    again = layers * count * each.again
    # The last rank waits at the ends of a step. In a folded pipeline, it has the first stage too, and
    # the gradients of weights fill the time after the last backward pass.
    filling = choose(plan.folded, 0.0, choose(plan.splits, each.forward_total, each.total))
    spread = machine.efficiency.spread * slowest(plan.layout.size)
    return StepParts(
        {
            "products": passes.products,
            "attention": passes.attention,
            "memory": passes.memory,
            "recompute": again,
            "launch": passes.launch + passes.host + machine.efficiency.step,
            "tensor": layers * count * each.tensor,
            "context": layers * count * each.context,
            "bubble": (plan.layout.pipeline - 1) / plan.stages * layers * filling,
            "pipeline": _send_seconds(model, plan, machine),
            "data": _data_seconds(model, plan, machine, each),
            "optimizer": _optimizer_seconds(model, plan, machine),
            "stragglers": spread * (passes.total + again),
        }
    )


@lru_cache
def slowest(count: int) -> float:
    """Return the expected maximum of `count` values of the standard normal distribution.

    The approximation of Blom 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _context_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds of context parallelism in forward and backward of a layer.

    All-to-all of queries, keys and values, and back; twice in backward, again if recomputed.
    """
    group = RankGroup(plan.layout.context, plan.layout.tensor)
    full = plan.tokens(model.seq) * model.hidden * plan.numbers.activation
    sent = full * (model.qkv / model.hidden + 1) / plan.layout.tensor
    passes = 3 + (plan.recompute == "full")
    return passes * collective_seconds("all_to_all", sent, group, machine)


def _tensor_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds of tensor parallelism in forward and backward of a layer.

    Two sums per pass. Under sequence parallelism, a sum is a reduce-scatter and an all-gather.
    """
    group, size = RankGroup(plan.layout.tensor, 1), plan.numbers.activation
    full = plan.tokens(model.seq) * model.hidden * size
    one, scatter, gather = (
        collective_seconds(each, full, group, machine)
        for each in ("all_reduce", "reduce_scatter", "all_gather")
    )
    sums = 4 + (1 + model.dropout) * (plan.recompute == "full")
    seconds = sums * choose(plan.sequence_parallel, scatter + gather, one)
    if plan.tensor_overlap:
        # The sum over the gradients of an input needs no gradients of weights.
        reduced = choose(plan.sequence_parallel, scatter, one)
        queries, _, up, _ = layer_products(model, plan)
        for rows, columns, inner in (queries, up):
            work = product_work((columns, inner, rows), size, machine.units)
            seconds -= smaller(reduced, compute_seconds(work, plan, machine).total)
    return seconds


def _send_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds that stages wait for activations and their gradients."""
    layout = plan.layout
    full = plan.tokens(model.seq) * model.hidden * plan.numbers.activation
    neighbours = RankGroup(layout.pipeline, layout.size // layout.pipeline)
    sent = full / layout.tensor if plan.split_sends else full
    # In each direction, of each micro-batch through each stage of this rank, and to fill the pipeline.
    messages = 2 * (plan.micro_batches * plan.stages + layout.pipeline - 1)
    return messages * collective_seconds("send", sent, neighbours, machine)


def _data_seconds(
    model: Transformer, plan: PlannedStep, machine: Machine, each: PassSeconds
) -> Quantity:
    """Return the seconds of the data axes that no computation hides."""
    tensor, numbers, layers = plan.layout.tensor, plan.numbers, model.layers / plan.layout.pipeline
    replicas = RankGroup(plan.copies, tensor * plan.shards)
    summed = stage_parameters(model, plan) / plan.shards * numbers.reduced
    exposed = collective_seconds("all_reduce", summed, replicas, machine)
    if plan.overlap:
        tail = collective_seconds("all_reduce", smaller(summed, BUCKET), replicas, machine)
        exposed = larger(tail, exposed - larger(layers - 1, 0) * each.backward.total)
    weights, table = model.layer_weights / tensor, model.embedding / tensor
    gather = _moved("all_gather", weights * numbers.gathered, plan, machine)
    scatter = _moved("reduce_scatter", weights * numbers.reduced, plan, machine)
    forward = each.forward_total if plan.overlap else 0.0
    backward = each.total - each.forward_total if plan.overlap else 0.0
    # A layer is gathered while its neighbour computes, and again for its backward pass unless it is
    # kept. In a pipeline, it is kept for all micro-batches. The table is gathered alone.
    gathers = choose(plan.layout.pipeline > 1, 1, plan.micro_batches)
    sums = choose(plan.keeps_gradients | (plan.layout.shard == 1), 1, plan.micro_batches)
    again = choose(plan.keeps_parameters, 0.0, gather)
    waits = gathers * _overlapped(gather, forward) + sums * _overlapped(again + scatter, backward)
    waits += (gathers - sums) * _overlapped(again, backward)
    moved = table * numbers.gathered * choose(plan.keeps_parameters, 1, 2)
    alone = sums * _moved("all_gather", moved + table * numbers.reduced, plan, machine)
    alone += (gathers - sums) * _moved("all_gather", moved, plan, machine)
    return sums * exposed + choose(plan.sharded, layers * waits + alone, 0.0)


def _moved(operation: str, count: Quantity, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds of a collective over the shards of the parameters."""
    return collective_seconds(operation, count, RankGroup(plan.shards, plan.layout.tensor), machine)


def _overlapped(communication: Quantity, compute: Quantity) -> Quantity:
    """Return the seconds that communication adds to the compute that it overlaps."""
    hidden = smaller(communication, compute)
    return communication - hidden + CONTENTION * hidden


def _optimizer_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds of clipping and of Adam: every number is read and most are written."""
    numbers = plan.numbers
    each = 2 * numbers.parameter + 3 * numbers.gradient + 2 * numbers.state
    parameters = stage_parameters(model, plan) / plan.shards
    return parameters * each / (machine.efficiency.memory * machine.memory_bandwidth)
