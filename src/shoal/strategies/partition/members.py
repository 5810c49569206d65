"""The ranks that have the stages of one copy of a model, and how one tells the others what it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shoal.distributed import objects
from shoal.distributed.to_device import move
from shoal.util.errors import AgreementError


class CannotTravelError(Exception):
    """What a module returns can't be sent to the other ranks."""


class StageRanks(NamedTuple):
    """The ranks of one copy of the model, by their places in a group."""

    group: dist.ProcessGroup
    place: int
    """This rank's own."""
    owners: Sequence[int]
    """Of the rank that runs each stage."""
    device: torch.device

    def tell(self, source: int, tree: Any) -> Any:
        """Return the tree of the rank at `source` on all ranks, on their device. Collective.

        Raises CannotTravelError on all ranks for what can't be sent; see `shoal.distributed.codec`.
        """
        try:
            told = objects.broadcast(tree if self.place == source else None, self.group, source)
        except AgreementError as error:
            raise CannotTravelError(error.found) from None
        return tree if self.place == source else move(told, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by place. Collective."""
        return objects.gather(value, self.group)
