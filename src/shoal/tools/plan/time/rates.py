"""Seconds of work on one device, an additive roofline, and of collectives between devices.

A matrix product takes 2MNK / (efficiency x peak) + bytes / (efficiency x bandwidth) + launch, and an
element-wise operation the last two. Layers whose operations are shorter than the host needs to start
them wait for the host: (device^4 + host^4)^(1/4).

Collectives take time by their bytes and by where their ranks are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.tools.plan.machine.machines import BASE_LATENCY, Machine
from shoal.tools.plan.work.planned_step import Amounts, PlannedStep, Quantity, RankGroup, Work
from shoal.tools.plan.work.stage_layers import split_layers
from shoal.tools.plan.work.transformer import Transformer


@dataclass(frozen=True)
class ComputeSeconds(Amounts):
    """Seconds on the device by kind, and those that it waits for the host."""

    products: Quantity = 0.0
    convolutions: Quantity = 0.0
    attention: Quantity = 0.0
    memory: Quantity = 0.0
    launch: Quantity = 0.0
    host: Quantity = 0.0
    fp8: Quantity = 0.0

    @property
    def total(self) -> Quantity:
        """All seconds."""
        return sum(vars(self).values())


def compute_seconds(work: Work, plan: PlannedStep, machine: Machine) -> ComputeSeconds:
    """Return the seconds of some work on one device."""
    rates, peak = machine.efficiency, peak_rate(plan, machine)
    products = work.products / (rates.product * peak)
    fp8 = work.fp8_products / (rates.product * (machine.fp8 or machine.half))
    convolutions = work.convolutions / (rates.convolution * peak)
    attention = work.attention / (rates.attention * peak)
    memory = (work.product_bytes + work.traffic) / (rates.memory * machine.memory_bandwidth)
    host = work.operations * rates.host
    if machine.is_cpu:  # the host computes
        return ComputeSeconds(products, convolutions, attention, memory, 0.0, host)
    launch = work.operations * rates.launch
    device = products + convolutions + attention + memory + launch + fp8
    waited = (device**4 + host**4) ** 0.25 - device
    return ComputeSeconds(products, convolutions, attention, memory, launch, waited, fp8)


def peak_rate(plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the FLOP/s of the data sheet in the precision of a plan."""
    return np.where(plan.numbers.activation == 2, machine.half, machine.tf32 or machine.fp32)


CONTENTION = 0.2
"""The part of a device that collectives at the rate of its links take from the computation that they
overlap: about 20 of the 108 multiprocessors of an A100 run NCCL's channels."""
_BUCKET = 25e6
"""Bytes of the last bucket of gradients, which no computation hides."""


class LayerSeconds(NamedTuple):
    """Seconds of the passes of a layer with their collectives, and of backward without."""

    forward: Quantity
    backward: Quantity
    computing_backward: Quantity


def ring_bandwidth(group: RankGroup, machine: Machine) -> Quantity:
    """Return the bytes/s of the slowest link of rings through a group.

    Rings through several nodes use the adapters of all members of the group in a node: other groups
    need the other adapters at the same time.
    """
    inside = machine.link * machine.efficiency.link
    members = group.per_node(machine.devices)
    between = members * machine.network * machine.efficiency.network
    slowest = np.where(members == 1, between, np.minimum(inside, between))
    return np.where(members == group.size, inside, slowest)


def contention(group: RankGroup, machine: Machine) -> Quantity:
    """Return the part of a device that a collective takes from the computation that it overlaps.

    Slower networks need fewer channels.
    """
    inside = machine.link * machine.efficiency.link
    return CONTENTION * np.minimum(1.0, ring_bandwidth(group, machine) / inside)


def collective_seconds(operation: str, count: Quantity, group: RankGroup, machine: Machine) -> Quantity:
    """Return the seconds of a collective of `count` bytes, the faster of ring and tree.

    `operation` is "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send".
    Bytes are of the full tensor; of one message in "send", of one rank's tensor in "all_to_all". On a
    CPU, collectives are those of Gloo.
    """
    seconds = BASE_LATENCY + _transfer_seconds(operation, count, group, machine)
    return np.where((group.size == 1) | (count == 0), 0.0, seconds)


def _transfer_seconds(operation: str, count: Quantity, group: RankGroup, machine: Machine) -> Quantity:
    size, bandwidth = group.size, ring_bandwidth(group, machine)
    link, network = machine.efficiency.link_latency, machine.efficiency.network_latency
    if operation == "send":
        return np.where(group.stride < machine.devices, link, network) + count / bandwidth
    nodes = -(-size // group.per_node(machine.devices))
    gloo = machine.cores is not None
    if operation == "broadcast" and gloo:
        # A binomial tree, whose ranks send all of their messages at the same time, over one link.
        depth = math.ceil(np.log2(size))
        near = np.where(nodes == 1, link, network)
        return depth * near + depth * (depth + 1) / 2 * count / bandwidth
    rounds = 2 if operation == "all_reduce" or (operation == "reduce_scatter" and gloo) else 1
    steps = rounds * (size - 1)
    across = np.minimum(steps, np.where(nodes > 1, rounds * nodes, 0))
    moved = count if operation == "broadcast" else rounds * (size - 1) / size * count
    ring = (steps - across) * link + across * network + moved / bandwidth
    if gloo and operation in ("all_gather", "reduce_scatter"):
        ring += staging_seconds(count, machine)
    if operation != "all_reduce" or gloo:
        return ring
    climbed = 2 * np.log2(nodes) * network + 2 * (size / nodes - 1) * link
    tree = climbed + moved / (0.9 * bandwidth)  # a tree keeps a tenth fewer links busy
    return np.minimum(ring, tree)


def staging_seconds(count: Quantity, machine: Machine) -> Quantity:
    """Return the seconds in which Gloo copies a full tensor of `count` bytes to or from its buffer."""
    return 2 * count / (machine.memory_bandwidth * machine.efficiency.staging)


def layer_collectives(
    model: Transformer, plan: PlannedStep, machine: Machine, weights: Sequence[Quantity]
) -> tuple[Quantity, Quantity]:
    """Return the seconds of tensor and of context parallelism in forward and backward of a layer.

    `weights` are seconds of gradients of weights, which sums over the gradients of inputs may overlap.
    """
    full = plan.tokens(model.seq) * model.hidden * plan.numbers.activation
    group = RankGroup(plan.layout.tensor, 1)
    one, scatter, gather = (
        collective_seconds(each, full, group, machine)
        for each in ("all_reduce", "reduce_scatter", "all_gather")
    )
    # Two sums per pass. Under sequence parallelism, a sum is a reduce-scatter and an all-gather.
    sums = 4 + (1 + model.dropout) * (plan.recompute == "full")
    tensor = sums * np.where(plan.sequence_parallel, scatter + gather, one)
    if plan.tensor_overlap:
        reduced = np.where(plan.sequence_parallel, scatter, one)
        tensor -= sum(np.minimum(reduced, seconds) for seconds in weights)
    # All-to-all of queries, keys and values, and back; twice in backward, again if recomputed.
    group = RankGroup(plan.layout.context, plan.layout.tensor)
    sent = full * (model.qkv / model.hidden + 1) / plan.layout.tensor
    passes = 3 + (plan.recompute == "full")
    return tensor, passes * collective_seconds("all_to_all", sent, group, machine)


def expert_seconds(model: Transformer, plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the seconds of a layer in which tokens move to their experts and back, both passes."""
    sent = plan.tokens(model.seq) * model.choices * model.hidden * plan.numbers.activation
    group = RankGroup(plan.layout.expert, plan.layout.context * plan.layout.tensor)
    passes = 4 + 2 * (plan.recompute == "full")
    return passes * collective_seconds("all_to_all", sent, group, machine)


def step_collectives(
    model: Transformer, plan: PlannedStep, machine: Machine, parameters: Quantity, layer: LayerSeconds
) -> tuple[Quantity, Quantity]:
    """Return the seconds for which stages wait for messages, and the exposed ones of the data axes.

    `parameters` are those of a rank before sharding.
    """
    layout = plan.layout
    full = plan.tokens(model.seq) * model.hidden * plan.numbers.activation
    neighbours = RankGroup(layout.pipeline, layout.size // layout.pipeline)
    sent = full / layout.tensor if plan.split_sends else full
    # In each direction, of each micro-batch through each stage of this rank, and to fill the pipeline.
    messages = 2 * (plan.micro_batches * plan.stages + layout.pipeline - 1)
    waiting = messages * collective_seconds("send", sent, neighbours, machine)

    split = split_layers(model, plan)
    # FSDP sums the gradients of other parameters over the expert axis too.
    experts = np.ceil(split.largest) * model.expert_weights / layout.expert
    over = np.where(plan.sharded, 1, layout.expert)
    stride = layout.tensor * plan.shards * layout.expert
    replicas = RankGroup(plan.copies * over, stride // over)
    size = plan.numbers.reduced / plan.shards
    summed = (parameters - experts) * over / layout.expert * size
    exposed = collective_seconds("all_reduce", summed, replicas, machine)
    copies = RankGroup(plan.copies, stride)
    exposed += collective_seconds("all_reduce", experts * size, copies, machine)
    if plan.overlap:
        tail = collective_seconds("all_reduce", np.minimum(summed, _BUCKET), replicas, machine)
        exposed = np.maximum(
            tail, exposed - np.maximum(split.busiest - 1, 0) * layer.computing_backward
        )
    sums = np.where(plan.keeps_gradients | (layout.shard == 1), 1, plan.micro_batches)
    sharded = _sharded_seconds(model, plan, machine, layer)
    return waiting, sums * exposed + np.where(plan.sharded, sharded, 0.0)


def _sharded_seconds(
    model: Transformer, plan: PlannedStep, machine: Machine, layer: LayerSeconds
) -> Quantity:
    """Return the exposed seconds of gathered parameters and of gradients that are summed over shards.

    A layer is gathered while its neighbour computes, and again for its backward pass unless it is kept.
    In a pipeline, it is kept for all micro-batches. The table is gathered alone.
    """
    numbers, tensor, piped = plan.numbers, plan.layout.tensor, plan.layout.pipeline > 1
    expert = plan.layout.expert
    shard, experts = RankGroup(plan.shards * expert, tensor), RankGroup(plan.shards, tensor * expert)
    weights, table = model.shared_weights / tensor, model.embedding / tensor
    own = model.expert_weights / expert
    gather, scatter = (
        collective_seconds(operation, weights * number, shard, machine)
        + collective_seconds(operation, own * number, experts, machine)
        for operation, number in (
            ("all_gather", numbers.gathered),
            ("reduce_scatter", numbers.reduced),
        )
    )
    forward, backward = (each if plan.overlap else 0.0 for each in (layer.forward, layer.backward))
    gathers = np.where(piped, 1, plan.micro_batches)
    sums = np.where(plan.keeps_gradients, 1, plan.micro_batches)
    again = np.where(plan.keeps_parameters, 0.0, gather)
    part = contention(shard, machine)
    waits = gathers * _overlapped(gather, forward, part)
    waits += sums * _overlapped(again + scatter, backward, part)
    waits += (gathers - sums) * _overlapped(again, backward, part)
    moved = table * numbers.gathered * np.where(plan.keeps_parameters, 1, 2)
    both = moved + table * numbers.reduced
    alone = sums * collective_seconds("all_gather", both, shard, machine)
    alone += (gathers - sums) * collective_seconds("all_gather", moved, shard, machine)
    return split_layers(model, plan).busiest * waits + alone


def _overlapped(communication: Quantity, compute: Quantity, part: Quantity) -> Quantity:
    """Return the seconds that communication adds to the compute that it overlaps, of which it takes a
    part."""
    hidden = np.minimum(communication, compute)
    return communication - hidden + part * hidden
