"""Helpers for torch's DTensor: sharded tensors, this rank's shard, and the full tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from shoal._torch.mesh import local_slices

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_divided(value: object) -> TypeGuard[DTensor]:
    """Return whether `value` is a DTensor. Does not import DTensor, which takes 0.5 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def over_experts(tensor: Tensor) -> bool:
    """Return whether ranks along the `expert` axis have different parts of `tensor`."""
    return is_divided(tensor) and "expert" in (tensor.device_mesh.mesh_dim_names or ())


def share(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if is_divided(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank that has a shard of it. Collective for a DTensor."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def parts(tensor: Tensor) -> int:
    """Return the number of ranks over which `tensor` is sharded; 1 if each has the full tensor."""
    if not is_divided(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


@torch.no_grad()
def copy_share(source: Tensor, target: Tensor) -> None:
    """Copy this rank's shard of the full tensor `source` into `target`."""
    if is_divided(target):
        source = source[local_slices(target)]
    share(target).copy_(source)


def shared_like(source: Tensor, like: Tensor) -> Tensor:
    """Return the full tensor `source`, sharded as `like` is; `source` itself if `like` is not."""
    if not is_divided(like):
        return source
    target = torch.empty_like(like, dtype=source.dtype)
    copy_share(source, target)
    return target


def divided(tree: Any, each: Callable[[DTensor], Tensor] = lambda tensor: tensor) -> dict[Any, Any]:
    """Return `each` of the DTensors in a tree of dicts, lists and tuples, at their paths only."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    kept: dict[Any, Any] = {}
    for key, value in items:
        if is_divided(value):
            kept[key] = each(value)
        elif isinstance(value, dict | list | tuple) and (below := divided(value, each)):
            kept[key] = below
    return kept
