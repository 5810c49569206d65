"""Micro-batches: what one forward and backward of one rank runs on."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shoal.distributed.world import World


class Micro(NamedTuple):
    """One micro-batch of one rank.

    `value` is what the dataset and the collate function made of `samples` samples from position
    `first` on. `weight` is 1, or 0 for the stand-in that a rank without samples runs in order to take
    part in the collectives of the step. `world` are the processes that share the global batch, None
    where nobody does.
    """

    value: Any
    first: int
    samples: int
    weight: float
    world: World | None = None


CURRENT_MICRO: ContextVar[Micro | None] = ContextVar("micro-batch under way", default=None)
"""What a Task's functions are being called on, for those that talk to other ranks (`shoal.gather`)."""
