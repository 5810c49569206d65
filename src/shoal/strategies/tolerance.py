"""Whether two outputs are the same up to rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
"""How far outputs may differ between sequences cut and whole, relative to the largest value."""

CHUNK = 2**24
"""How many elements are compared at once, in float64."""


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value; infinite for another shape."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    apart = largest = 0.0
    for some, others in zip(found.flatten().split(CHUNK), expected.flatten().split(CHUNK), strict=True):
        one, other = some.double(), others.double()
        same = (one == other) | (one.isnan() & other.isnan())  # infinite where something is masked
        differences = (one - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)
        apart = max(apart, float(differences.max()))
        largest = max(largest, float(other.masked_fill(~other.isfinite(), 0.0).abs().max()))
    return apart and apart / max(largest, torch.finfo(expected.dtype).tiny)
