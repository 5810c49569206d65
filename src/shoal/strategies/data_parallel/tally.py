"""The sums of loss and count that DDP's reducer sums along with the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def tally_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return the widest real floating dtype among `parameters`, at least float32.

    A tally of the same dtype as the parameters can be in a bucket with them.
    """
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return torch.float64 if wide else torch.float32


def whole(count: float, dtype: torch.dtype, ranks: int) -> float:
    """Return `count` without the rounding error that averaging over ranks left on an integer."""
    if not math.isfinite(count):
        return count
    nearest = float(round(count))
    return nearest if abs(count - nearest) <= 4 * ranks * torch.finfo(dtype).eps * nearest else count


def whole_on_device(count: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return what `whole` does, of a float64 tensor, without waiting for the device."""
    nearest = count.round()
    close = (count - nearest).abs() <= 4 * ranks * torch.finfo(dtype).eps * nearest
    return torch.where(close, nearest, count)
