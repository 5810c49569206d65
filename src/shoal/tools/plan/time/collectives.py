"""Seconds of collectives, by bytes and by where their ranks are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.tools.plan.machine.machines import Machine

BASE_LATENCY = 30e-6
"""Seconds of any collective, in addition to its steps: fitted to measured all-reduces on A100."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective: their number, and the distance of neighbours in rank order.

    Ranks fill one node after the other, so that `stride` and the devices of a node say how many
    members a node has.
    """

    size: int
    stride: int

    def per_node(self, devices: int) -> int:
        """Return the members of the group that share a node."""
        return max(1, min(self.size, devices // self.stride))


def ring_bandwidth(group: RankGroup, machine: Machine) -> float:
    """Return the bytes/s of the slowest link of rings through a group.

    Rings through several nodes use the adapters of all members of the group in a node: other groups
    need the other adapters at the same time.
    """
    inside = machine.link * machine.efficiency.link
    members = group.per_node(machine.devices)
    if members == group.size:
        return inside
    between = members * machine.network * machine.efficiency.network
    return between if members == 1 else min(inside, between)


def collective_seconds(operation: str, count: float, group: RankGroup, machine: Machine) -> float:
    """Return the seconds of a collective of `count` bytes, the faster of ring and tree.

    `operation` is "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send".
    Bytes are of the full tensor; of one message in "send", of one rank's tensor in "all_to_all". On a
    CPU, collectives are those of Gloo.
    """
    size = group.size
    if size == 1 or count == 0:
        return 0.0
    bandwidth = ring_bandwidth(group, machine)
    link, network = machine.efficiency.link_latency, machine.efficiency.network_latency
    if operation == "send":
        near = link if group.stride < machine.devices else network
        return BASE_LATENCY + near + count / bandwidth
    nodes = -(-size // group.per_node(machine.devices))
    gloo = machine.cores is not None
    if operation == "broadcast" and gloo:
        # A binomial tree, whose ranks send all of their messages at the same time, over one link.
        depth = math.ceil(math.log2(size))
        near = link if nodes == 1 else network
        return BASE_LATENCY + depth * near + depth * (depth + 1) / 2 * count / bandwidth
    rounds = 2 if operation == "all_reduce" or (operation == "reduce_scatter" and gloo) else 1
    steps = rounds * (size - 1)
    across = rounds * nodes if nodes > 1 else 0
    moved = count if operation == "broadcast" else rounds * (size - 1) / size * count
    ring = (steps - min(steps, across)) * link + min(steps, across) * network + moved / bandwidth
    if gloo and operation in ("all_gather", "reduce_scatter"):
        ring += staging_seconds(count, machine)
    if operation != "all_reduce" or gloo:
        return BASE_LATENCY + ring
    climbed = 2 * math.log2(nodes) * network + 2 * (size / nodes - 1) * link
    tree = climbed + moved / (0.9 * bandwidth)  # a tree keeps a tenth fewer links busy
    return BASE_LATENCY + min(ring, tree)


def staging_seconds(count: float, machine: Machine) -> float:
    """Return the seconds in which Gloo copies a full tensor of `count` bytes to or from its buffer."""
    return 2 * count / (machine.memory_bandwidth * machine.efficiency.staging)
