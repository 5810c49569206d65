"""torch's operations on lists of tensors: one kernel for all of them on CUDA.

torch documents them, in beta, under these private names only. Where a torch lacks one, the same is
computed tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def copy_(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of `values` to its place in `into`."""
    _apply("copy_", into, values)


def add_(tensors: Sequence[Tensor], others: Sequence[Tensor], *, alpha: float = 1) -> None:
    """Add `alpha` times each of `others`, in place."""
    _apply("add_", tensors, others, alpha=alpha)


def sub_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Subtract each of `others`, in place."""
    _apply("sub_", tensors, others)


def neg_(tensors: Sequence[Tensor]) -> None:
    """Change the sign, in place."""
    _apply("neg_", tensors)


def mul_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply by `factor`, in place. A factor on the device has no dimensions.

    Both give the same bits, except on the CPU in 16 bits, for which torch rounds a number.
    """
    if not isinstance(factor, Tensor):
        _apply("mul_", tensors, factor)
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        _apply("mul_", same, factor.to(torch.promote_types(dtype, torch.float32)))


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """Move each of `tensors` towards its end by the part `weight` of the way, in place."""
    _apply("lerp_", tensors, ends, weight)


def norm(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the L2 norm of each tensor, computed in `dtype`."""
    fused = getattr(torch, "_foreach_norm", None)
    if fused is None:
        return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    norms: Sequence[Tensor] = fused(list(tensors), 2, dtype)
    return norms


def _apply(name: str, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> None:
    fused = getattr(torch, f"_foreach_{name}", None)
    if fused is not None:
        given = (list(each) if isinstance(each, Sequence) else each for each in arguments)
        fused(list(tensors), *given, **options)
        return
    for index, tensor in enumerate(tensors):
        row = (each[index] if isinstance(each, Sequence) else each for each in arguments)
        getattr(tensor, name)(*row, **options)
