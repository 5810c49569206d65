"""The work of a step as values: FLOPs, bytes, operations and collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Quantity: TypeAlias = Any
"""A number of one plan, or an array with the numbers of several plans."""


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes and operations."""

    products: Quantity = 0.0
    product_bytes: Quantity = 0.0
    attention: Quantity = 0.0
    traffic: Quantity = 0.0
    operations: Quantity = 0.0
    convolutions: Quantity = 0.0

    def __mul__(self, factor: Quantity) -> Work:
        return Work(*(each * factor for each in vars(self).values()))

    def __add__(self, other: Work) -> Work:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(ours + theirs for ours, theirs in pairs))


@dataclass(frozen=True)
class RankGroup:
    """Ranks of one collective: their number, and the distance of neighbours in rank order.

    Ranks fill one node after the other, so that `stride` and the devices of a node say how many
    members a node has.
    """

    size: Quantity
    stride: Quantity

    def per_node(self, devices: int) -> Quantity:
        """Return the members of the group that share a node."""
        return np.maximum(1, np.minimum(self.size, devices // self.stride))


@dataclass(frozen=True, kw_only=True)
class StepCollective:
    """A call of a collective, with the bytes of the full tensor.

    `wait` says what waits for it: "module" (the next operation), "stream" (the stream that calls it,
    on a CPU the next operation) or "update" (nothing before the update). A send and a receive have the
    other rank of the group (`peer`) and the number of the message. A receive stands where the message
    is first read.
    """

    operation: str
    count: int
    group: RankGroup
    wait: str
    peer: int = -1
    message: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkSegment:
    """The work of a rank until its next collective, in one part of the step (`moment`)."""

    moment: str
    work: Work
    collective: StepCollective | None = None
