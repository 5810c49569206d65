"""Seconds of collectives, by bytes and by where their ranks are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.plan.machines import Machine

LINK_LATENCY, NETWORK_LATENCY, BASE_LATENCY = 3.4e-6, 14e-6, 30e-6
"""Seconds of one step in a node and between nodes, and of any collective: the defaults of NCCL's tuner
for its protocol Simple."""


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

    `operation` is "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "send". Bytes are of
    the full tensor; of one message in "send", of one rank's tensor in "all_to_all".
    """
    size = group.size
    if size == 1 or count == 0:
        return 0.0
    bandwidth = ring_bandwidth(group, machine)
    if operation == "send":
        inside = group.stride < machine.devices
        return BASE_LATENCY + (LINK_LATENCY if inside else NETWORK_LATENCY) + count / bandwidth
    nodes = -(-size // group.per_node(machine.devices))
    rounds = 2 if operation == "all_reduce" else 1
    steps = rounds * (size - 1)
    across = rounds * nodes if nodes > 1 else 0
    moved = rounds * (size - 1) / size * count
    ring = (steps - min(steps, across)) * LINK_LATENCY + across * NETWORK_LATENCY + moved / bandwidth
    if operation != "all_reduce":
        return BASE_LATENCY + ring
    depth = 2 * math.log2(nodes) * NETWORK_LATENCY + 2 * (size / nodes - 1) * LINK_LATENCY
    tree = depth + moved / (0.9 * bandwidth)  # a tree keeps a tenth fewer links busy
    return BASE_LATENCY + min(ring, tree)
