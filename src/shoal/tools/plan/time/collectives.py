"""Seconds of collectives, by bytes and by where their ranks are."""

from __future__ import annotations

import math

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.work.quantities import Quantity, choose, log2, smaller
from shoal.tools.plan.work.segments import RankGroup

BASE_LATENCY = 30e-6
"""Seconds of any collective, in addition to its steps: fitted to measured all-reduces on A100."""


def ring_bandwidth(group: RankGroup, machine: Machine) -> Quantity:
    """Return the bytes/s of the slowest link of rings through a group.

    Rings through several nodes use the adapters of all members of the group in a node: other groups
    need the other adapters at the same time.
    """
    inside = machine.link * machine.efficiency.link
    members = group.per_node(machine.devices)
    between = members * machine.network * machine.efficiency.network
    slowest = choose(members == 1, between, smaller(inside, between))
    return choose(members == group.size, inside, slowest)


def collective_seconds(operation: str, count: Quantity, group: RankGroup, machine: Machine) -> Quantity:
    """Return the seconds of a collective of `count` bytes, the faster of ring and tree.

    `operation` is "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send".
    Bytes are of the full tensor; of one message in "send", of one rank's tensor in "all_to_all". On a
    CPU, collectives are those of Gloo.
    """
    seconds = BASE_LATENCY + _transfer_seconds(operation, count, group, machine)
    return choose((group.size == 1) | (count == 0), 0.0, seconds)


def _transfer_seconds(operation: str, count: Quantity, group: RankGroup, machine: Machine) -> Quantity:
    size, bandwidth = group.size, ring_bandwidth(group, machine)
    link, network = machine.efficiency.link_latency, machine.efficiency.network_latency
    if operation == "send":
        return choose(group.stride < machine.devices, link, network) + count / bandwidth
    nodes = -(-size // group.per_node(machine.devices))
    gloo = machine.cores is not None
    if operation == "broadcast" and gloo:
        # A binomial tree, whose ranks send all of their messages at the same time, over one link.
        depth = math.ceil(log2(size))
        near = choose(nodes == 1, link, network)
        return depth * near + depth * (depth + 1) / 2 * count / bandwidth
    rounds = 2 if operation == "all_reduce" or (operation == "reduce_scatter" and gloo) else 1
    steps = rounds * (size - 1)
    across = smaller(steps, choose(nodes > 1, rounds * nodes, 0))
    moved = count if operation == "broadcast" else rounds * (size - 1) / size * count
    ring = (steps - across) * link + across * network + moved / bandwidth
    if gloo and operation in ("all_gather", "reduce_scatter"):
        ring += staging_seconds(count, machine)
    if operation != "all_reduce" or gloo:
        return ring
    climbed = 2 * log2(nodes) * network + 2 * (size / nodes - 1) * link
    tree = climbed + moved / (0.9 * bandwidth)  # a tree keeps a tenth fewer links busy
    return smaller(ring, tree)


def staging_seconds(count: Quantity, machine: Machine) -> Quantity:
    """Return the seconds in which Gloo copies a full tensor of `count` bytes to or from its buffer."""
    return 2 * count / (machine.memory_bandwidth * machine.efficiency.staging)
