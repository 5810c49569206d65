"""Seconds of one optimizer step, by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from shoal.distributed.pipeline_schedules import SCHEDULES
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.memory.estimate import stage_parameters
from shoal.tools.plan.time.collectives import RankGroup, collective_seconds
from shoal.tools.plan.time.layer_time import (
    ComputeSeconds,
    Work,
    backward_work,
    compute_seconds,
    gradient_work,
    layer_communication,
    layer_work,
    product_work,
)
from shoal.tools.plan.work.configuration import PlannedStep
from shoal.tools.plan.work.products import alignment_factor
from shoal.tools.plan.work.transformer import Transformer

LOSS_BYTES = 16
"""Bytes that the loss reads and writes per score, forward and backward, in float32: cast, log_softmax,
their gradients."""
CONTENTION = 0.2
"""The part of a device that collectives take from the computation that they overlap: about 20 of the
108 multiprocessors of an A100 run NCCL's channels."""
BUCKET = 25e6
"""Bytes of the last bucket of gradients, which no computation hides."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds of one optimizer step, by part. They add up to `total`."""

    products: float
    attention: float
    memory: float
    """Element-wise operations, and the operands of products."""
    recompute: float
    launch: float
    """Between operations, and for the host."""
    tensor: float
    context: float
    bubble: float
    """Stages that wait for others."""
    pipeline: float
    """Activations sent between stages."""
    data: float
    """Gradients and gathered parameters that no computation hides."""
    optimizer: float
    stragglers: float
    """Waiting for the slowest device."""

    @property
    def total(self) -> float:
        """All seconds."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class LayerPass:
    """Seconds of one layer and one micro-batch, forward and backward."""

    forward: ComputeSeconds
    backward: ComputeSeconds
    again: float
    tensor: float
    context: float

    @property
    def total(self) -> float:
        """All seconds."""
        return self.forward.total + self.backward.total + self.again + self.tensor + self.context

    @property
    def forward_total(self) -> float:
        """Seconds of the forward pass with its collectives."""
        return self.forward.total + (self.tensor + self.context) / 3


def layer_pass(model: Transformer, plan: PlannedStep, machine: Machine) -> LayerPass:
    """Return the seconds of one layer and one micro-batch."""
    work = layer_work(model, plan, machine.units)
    backward, again = backward_work(model, work, plan.recompute)
    tensor, context = layer_communication(model, plan, machine)
    return LayerPass(
        forward=compute_seconds(work.forward, plan, machine),
        backward=compute_seconds(backward, plan, machine),
        again=compute_seconds(again, plan, machine).total,
        tensor=tensor,
        context=context,
    )


def estimate_step(model: Transformer, plan: PlannedStep, machine: Machine) -> StepEstimate:
    """Return the predicted time of one optimizer step of a valid configuration.

    The last stage computes without pause between its first and last micro-batch: its layers, and the
    output layer. The others add the time in which it waits for its first one. For schedules that split
    the backward pass, this is the least possible time.
    """
    layout, count = plan.layout, plan.micro_batches
    layers = model.layers / layout.pipeline
    layer = layer_pass(model, plan, machine)
    head = compute_seconds(head_work(model, plan, machine.units), plan, machine)
    tables = compute_seconds(table_work(model, plan), plan, machine)
    parts = [
        (layers * count, layer.forward),
        (layers * count, layer.backward),
        (count, head),
        (count, tables),
    ]

    def seconds(name: str) -> float:
        return float(sum(times * getattr(part, name) for times, part in parts))

    bubble = (layout.pipeline - 1) / plan.stages * layers * filling_seconds(plan, layer)
    working = layers * count * (layer.total - layer.tensor - layer.context)
    working += count * (head.total + tables.total)
    return StepEstimate(
        products=seconds("products"),
        attention=seconds("attention"),
        memory=seconds("memory"),
        recompute=layers * count * layer.again,
        launch=seconds("launch") + seconds("host") + machine.efficiency.step,
        tensor=layers * count * layer.tensor,
        context=layers * count * layer.context,
        bubble=bubble,
        pipeline=_transfer_seconds(model, plan, machine),
        data=_data_seconds(model, plan, machine, layer, layers),
        optimizer=_optimizer_seconds(model, plan, machine),
        stragglers=machine.efficiency.spread * slowest(layout.size) * working,
    )


def filling_seconds(plan: PlannedStep, layer: LayerPass) -> float:
    """Return the seconds of a layer for which the last rank waits at the ends of a step."""
    kind = SCHEDULES[plan.schedule]
    if kind.folded:
        return 0.0  # it has the first stage too
    # The gradients of weights fill the time after the last backward pass.
    return layer.forward_total if kind.splits else layer.total


@lru_cache
def slowest(count: int) -> float:
    """Return the expected maximum of `count` values of the standard normal distribution.

    The approximation of Blom 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def head_work(model: Transformer, plan: PlannedStep, units: int | None) -> Work:
    """Return the work of the output layer and the loss, forward and backward, of one micro-batch."""
    size, rows = plan.numbers.activation, plan.micro_batch * model.seq / plan.layout.context
    columns = model.vocab / plan.layout.tensor
    shape = (rows, columns, model.hidden)
    product = product_work(shape, size, units) + gradient_work(shape, size, units)
    aligned = replace(product, products=product.products * alignment_factor(columns, size))
    scores = rows * (columns if plan.splits_logits else model.vocab)
    return aligned + Work(traffic=scores * LOSS_BYTES, operations=12)


def table_work(model: Transformer, plan: PlannedStep) -> Work:
    """Return the work of the embedding's gradient: zeros, to which the rows of the tokens are added."""
    table = model.embedding / plan.layout.tensor if plan.layout.pipeline == 1 else 0.0
    return Work(traffic=table * 2 * plan.numbers.activation, operations=2)


def send_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
    """Return the seconds of one message between stages."""
    layout = plan.layout
    full = plan.micro_batch * model.seq / layout.context * model.hidden * plan.numbers.activation
    neighbours = RankGroup(layout.pipeline, layout.size // layout.pipeline)
    sent = full / layout.tensor if plan.split_sends else full
    return collective_seconds("send", sent, neighbours, machine)


def _transfer_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
    """Return the seconds that stages wait for activations and their gradients."""
    if plan.layout.pipeline == 1:
        return 0.0
    # In each direction, of each micro-batch through each stage of this rank, and to fill the pipeline.
    messages = 2 * (plan.micro_batches * plan.stages + plan.layout.pipeline - 1)
    return messages * send_seconds(model, plan, machine)


def _data_seconds(
    model: Transformer, plan: PlannedStep, machine: Machine, layer: LayerPass, layers: float
) -> float:
    """Return the seconds of the data axes that no computation hides."""
    layout, numbers = plan.layout, plan.numbers
    shard = RankGroup(plan.shards, layout.tensor)
    replicas = RankGroup(plan.copies, layout.tensor * plan.shards)
    parameters = stage_parameters(model, plan)
    sums = 1 if plan.keeps_gradients or layout.shard == 1 else plan.micro_batches
    summed = parameters / plan.shards * numbers.reduced
    exposed = collective_seconds("all_reduce", summed, replicas, machine)
    if plan.overlap and plan.copies > 1:
        hidden = layers * layer.backward.total * (1 - 1 / max(layers, 1))
        tail = collective_seconds("all_reduce", min(summed, BUCKET), replicas, machine)
        exposed = max(tail, exposed - hidden)
    if layout.shard == 1:
        return exposed
    weights = model.layer_weights / layout.tensor
    gather = collective_seconds("all_gather", weights * numbers.gathered, shard, machine)
    scatter = collective_seconds("reduce_scatter", weights * numbers.reduced, shard, machine)
    forward = layer.forward_total if plan.overlap else 0.0
    backward = layer.total - layer.forward_total if plan.overlap else 0.0
    # A layer is gathered while its neighbour computes, and again for its backward pass unless it is
    # kept. In a pipeline, it is kept for all micro-batches. The table is gathered alone.
    gathers = 1 if layout.pipeline > 1 else plan.micro_batches
    again = 0.0 if plan.keeps_parameters else gather
    waits = gathers * _overlapped(gather, forward) + sums * _overlapped(again + scatter, backward)
    waits += (gathers - sums) * _overlapped(again, backward)
    table = model.embedding / layout.tensor
    moved = table * numbers.gathered * (1 if plan.keeps_parameters else 2)
    alone = sums * collective_seconds("all_gather", moved + table * numbers.reduced, shard, machine)
    alone += (gathers - sums) * collective_seconds("all_gather", moved, shard, machine)
    return sums * exposed + layers * waits + alone


def _overlapped(communication: float, compute: float) -> float:
    """Return the seconds that communication adds to the compute that it overlaps."""
    return max(0.0, communication - compute) + CONTENTION * min(communication, compute)


def _optimizer_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> float:
    """Return the seconds of clipping and of Adam: every number is read and most are written."""
    numbers = plan.numbers
    each = 2 * numbers.parameter + 3 * numbers.gradient + 2 * numbers.state
    parameters = stage_parameters(model, plan) / plan.shards
    return parameters * each / (machine.efficiency.memory * machine.memory_bandwidth)
