"""FLOPs that a GPU takes for a matrix product, with those that its tiles lose.

A GPU computes a product in tiles of the result, one per processor at a time. A last round with few
tiles takes as long as a full one, and small tiles load more bytes per FLOP.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and its speed relative to the largest: assumed, from the bytes that a
tile loads per FLOP."""
_FILL = 96
"""Terms of a sum that a tile could have computed while it starts and while it writes its result."""
_SPLITS = (1, 2, 4, 8)
"""Parts into which the terms of a sum are split, if the result has few tiles."""
_UNALIGNED = 2.5
"""Time of a product whose rows do not begin at multiples of 16 bytes, relative to aligned rows."""


@lru_cache(maxsize=65536)
def tiled_flops(rows: float, columns: float, inner: float, units: int | None) -> float:
    """Return the FLOPs that `units` processors could have computed in the time of a product.

    The result has `rows` times `columns` numbers, each the sum of `inner` terms. Without a number of
    processors, these are the FLOPs of the product.
    """
    useful = 2 * rows * columns * inner
    if units is None:
        return useful
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


def alignment_factor(columns: float, size: int) -> float:
    """Return the factor on the time of a product whose rows have this many numbers of `size` bytes."""
    return 1.0 if columns * size % 16 == 0 else _UNALIGNED
