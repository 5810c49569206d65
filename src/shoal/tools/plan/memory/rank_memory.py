"""Bytes of a rank by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.tools.plan.work.segments import Quantity


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the moment of a step at which it needs most.

    In a trace, `activations` were allocated in the forward pass, `temporary` in the backward pass, the
    update and the checks on the first batch. `communication` are gathered parameters and buffers of
    collectives. `moment` says when: "forward", "backward", "update" or "checks". `reserved` is what
    torch's allocator takes from a GPU, with rounding and fragmentation; 0 if it is not known.
    """

    kinds: Mapping[str, Quantity]
    moment: str = ""
    reserved: int = 0

    @property
    def total(self) -> Quantity:
        """All bytes."""
        return sum(self.kinds.values())
