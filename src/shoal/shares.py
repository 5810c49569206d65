"""Tensors divided over ranks (torch's DTensor): a rank's share of one, and the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def share(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`: its part of a divided one, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of `tensor`, on every rank that has a part of it. Collective for a divided one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_share(source: Tensor, target: Tensor) -> None:
    """Copy into `target` this rank's part of `source`, which is whole."""
    if isinstance(target, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        spans = zip(offsets, sizes, strict=True)
        source = source[tuple(slice(offset, offset + size) for offset, size in spans)]
    share(target).copy_(source)


def shared_like(source: Tensor, like: Tensor) -> Tensor:
    """`source`, which is whole, divided as `like` is; itself if that one isn't divided."""
    if not isinstance(like, DTensor):
        return source
    target = torch.empty_like(like, dtype=source.dtype)
    copy_share(source, target)
    return target


def divided(tree: Any, each: Callable[[DTensor], Tensor] = lambda tensor: tensor) -> dict[Any, Any]:
    """`each` of the divided tensors in a tree of dicts, lists and tuples, at their paths; no others."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    kept: dict[Any, Any] = {}
    for key, value in items:
        if isinstance(value, DTensor):
            kept[key] = each(value)
        elif isinstance(value, dict | list | tuple) and (below := divided(value, each)):
            kept[key] = below
    return kept
