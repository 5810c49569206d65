"""Collectives for compressed gradients, with a count of the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal._torch import foreach
from shoal.distributed.world import World


class CountedCollectives:
    """Means, gathers and exchanges over all ranks. `sent` is the number of bytes this rank has sent.

    Counted for the usual bandwidth-optimal algorithms (Patarasuk and Yuan 2009): for n bytes on r
    ranks, 2 n (r-1)/r for a mean, n (r-1) for a gather, n (r-1)/r for an exchange.
    """

    def __init__(self, world: World) -> None:
        self.size = world.size
        self.rank = world.rank
        self.sent = 0
        self._group = world.group

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its mean over the ranks, and return it. Collective."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
            tensor.div_(self.size)
            self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape and dtype. Collective."""
        if self.size == 1:
            return [tensor]
        everyone = list(tensor.new_empty(self.size, *tensor.shape).unbind())
        dist.all_gather(everyone, tensor.contiguous(), group=self._group)
        self.sent += tensor.nbytes * (self.size - 1)
        return everyone

    def swap(self, rows: Tensor) -> Tensor:
        """Send row i to rank i, and return the rows that all ranks have for this one. Collective."""
        if self.size == 1:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=self._group)
        self.sent += rows.nbytes * (self.size - 1) // self.size
        return received


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements, concatenated in a new tensor of one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of `flat` back into `tensors`, which `joined` concatenated."""
    if tensors:
        parts = flat.split([tensor.numel() for tensor in tensors])
        shaped = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        foreach.copy_(list(tensors), shaped)
