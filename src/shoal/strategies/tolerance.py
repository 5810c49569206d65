"""The distance of two outputs, and the tolerances of rounding errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Largest difference of outputs, relative to the largest value, that can be a rounding error."""

CHUNK = 2**24
"""Number of elements compared at a time, in float64."""


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite for another shape."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    apart = largest = 0.0
    for some, others in zip(found.flatten().split(CHUNK), expected.flatten().split(CHUNK), strict=True):
        one, other = some.double(), others.double()
        same = (one == other) | (one.isnan() & other.isnan())  # infinite values of masks
        differences = (one - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)
        apart = max(apart, float(differences.max()))
        largest = max(largest, float(other.masked_fill(~other.isfinite(), 0.0).abs().max()))
    return apart and apart / max(largest, torch.finfo(expected.dtype).tiny)
