"""Pairs of random vectors, and the squared distance of a model's output from the second of each."""

from __future__ import annotations

import torch
from torch import Tensor


def pairs(samples: int, width: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of shape (samples, width), the same at each call."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    return values, torch.randn(samples, width, generator=generator, dtype=torch.float64)


def squared_distance(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return (sum, count) for a Task."""
    return (output - batch[1]).square().sum(), len(output)
