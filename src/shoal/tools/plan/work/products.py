"""FLOPs that a GPU takes for a matrix product, with those that its tiles lose.

A GPU computes a product in tiles of the result, one per processor at a time. A last round with few
tiles takes as long as a full one, and small tiles load more bytes per FLOP.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from shoal.tools.plan.work.quantities import Quantity, choose

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its speed relative to the largest: assumed, from the bytes that a
tile loads per FLOP."""
_FILL = 96
"""Terms of a sum that a tile could have computed while it starts and while it writes its result."""
_SPLITS = (1, 2, 4, 8)
"""Parts into which the terms of a sum are split, if the result has few tiles."""
_UNALIGNED = 2.5
"""Time of a product whose rows do not begin at multiples of 16 bytes, relative to aligned rows."""


def tiled_flops(rows: Quantity, columns: Quantity, inner: Quantity, units: int | None) -> Quantity:
    """Return the FLOPs that `units` processors could have computed in the time of a product.

    The result has `rows` times `columns` numbers, each the sum of `inner` terms. Without a number of
    processors, these are the FLOPs of the product.
    """
    if units is None:
        return 2 * rows * columns * inner
    if any(isinstance(each, np.ndarray) for each in (rows, columns, inner)):
        return np.vectorize(_tiled_flops, otypes=[np.float64])(rows, columns, inner, units)
    return _tiled_flops(rows, columns, inner, units)


@lru_cache(maxsize=65536)
def _tiled_flops(rows: float, columns: float, inner: float, units: int) -> float:
    useful = 2 * rows * columns * inner
    least = math.inf
    for high, wide, speed in _TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide)
        for parts in _SPLITS:
            if parts > 1 and inner / parts < 4 * _FILL:
                break
            rounds = math.ceil(tiles * parts / units)
            terms = inner / parts + _FILL
            least = min(least, rounds * units * 2 * high * wide * terms / speed)
    return max(least, useful)


def alignment_factor(columns: Quantity, size: Quantity) -> Quantity:
    """Return the factor on the time of a product whose rows have this many numbers of `size` bytes."""
    return choose(columns * size % 16 == 0, 1.0, _UNALIGNED)
