"""Tensors divided over ranks (torch's DTensor): a rank's share of one, and the whole."""

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
    """Whether `value` is a DTensor; where nobody has imported that (half a second), nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def share(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`: its part of a divided one, else the tensor itself."""
    return tensor.to_local() if is_divided(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of `tensor`, on every rank that has a part of it. Collective for a divided one."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def parts(tensor: Tensor) -> int:
    """Over how many ranks `tensor` is divided; 1 if each has all of it."""
    if not is_divided(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


@torch.no_grad()
def copy_share(source: Tensor, target: Tensor) -> None:
    """Copy into `target` this rank's part of `source`, which is whole."""
    if is_divided(target):
        source = source[local_slices(target)]
    share(target).copy_(source)


def shared_like(source: Tensor, like: Tensor) -> Tensor:
    """`source`, which is whole, divided as `like` is; itself if that one isn't divided."""
    if not is_divided(like):
        return source
    target = torch.empty_like(like, dtype=source.dtype)
    copy_share(source, target)
    return target


def divided(tree: Any, each: Callable[[DTensor], Tensor] = lambda tensor: tensor) -> dict[Any, Any]:
    """`each` of the divided tensors in a tree of dicts, lists and tuples, at their paths; no others."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    kept: dict[Any, Any] = {}
    for key, value in items:
        if is_divided(value):
            kept[key] = each(value)
        elif isinstance(value, dict | list | tuple) and (below := divided(value, each)):
            kept[key] = below
    return kept
