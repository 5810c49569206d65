"""The ranks that have the stages of one replica, and their collectives on trees of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shoal._torch.waits import arrived
from shoal.distributed import objects
from shoal.distributed.to_device import move
from shoal.util.errors import AgreementError


class CannotTravelError(Exception):
    """Error for an output of a module that cannot be sent to the other ranks."""


class StageRanks(NamedTuple):
    """The ranks of one replica, by their indices in a group."""

    group: dist.ProcessGroup
    place: int
    """Index of this rank."""
    owners: Sequence[int]
    """Indices of the ranks that run the stages."""
    device: torch.device

    def tell(self, source: int, tree: Any) -> Any:
        """Broadcast the tree of the rank at `source` to the device of each rank. Collective.

        Raises CannotTravelError on all ranks for a tree that cannot be sent; see
        `shoal.distributed.codec`.
        """
        tree = arrived(tree)
        try:
            received = objects.broadcast(tree if self.place == source else None, self.group, source)
        except AgreementError as error:
            raise CannotTravelError(error.found) from None
        return tree if self.place == source else move(received, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by index. Collective."""
        return objects.gather(value, self.group)
