"""Tensors sent to other ranks as bytes, since backends know only some dtypes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Copy `tensors` from rank `source` of the group to its other ranks, in place. Collective.

    They have the same shapes and dtypes on all ranks, and any strides.
    """
    sent = []
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        work = dist.broadcast(as_bytes(dense), group=group, group_src=source, async_op=True)
        sent.append((tensor.detach(), dense, work))
    for tensor, dense, work in sent:
        if work is not None:
            work.wait()
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks of the group, which have one shape and dtype. Collective."""
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(mine), group=group)
    return parts


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8)
