"""Collectives of strategies that save bytes, and how many a rank puts on the wire for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal._torch import foreach
from shoal.distributed.world import World


class Wire:
    """Means, gathers and swaps over all ranks; `sent` is what this rank has put on the wire so far.

    Counted as the usual algorithms send it, with the fewest bytes there are (Patarasuk and Yuan 2009):
    of n bytes on r ranks 2 n (r-1)/r for a mean, n (r-1) for a gather, n (r-1)/r for a swap.
    """

    def __init__(self, world: World) -> None:
        self.size = world.size
        self.rank = world.rank
        self.sent = 0
        self._group = world.group

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of `tensor` over the ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
            tensor.div_(self.size)
            self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Those of all ranks, which have one shape and dtype. Collective."""
        if self.size == 1:
            return [tensor]
        everyone = list(tensor.new_empty(self.size, *tensor.shape).unbind())
        dist.all_gather(everyone, tensor.contiguous(), group=self._group)
        self.sent += tensor.nbytes * (self.size - 1)
        return everyone

    def swap(self, rows: Tensor) -> Tensor:
        """Row i goes to rank i; back come the rows that the ranks have for this one. Collective."""
        if self.size == 1:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=self._group)
        self.sent += rows.nbytes * (self.size - 1) // self.size
        return received


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements one after the other, in a new tensor of one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The elements of `flat` into `tensors`, which were joined to one like it."""
    if tensors:
        parts = flat.split([tensor.numel() for tensor in tensors])
        shaped = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        foreach.copy_(list(tensors), shaped)
