"""Philox 4x32-10, a counter-based random generator (Salmon et al. 2011), for rows of consecutive keys.

Each row belongs to one sample. On the CPU, NumPy computes blocks that fit the cache; on other devices
torch computes the same words with integer operations.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

Key = tuple[int, int]
"""Two words of 32 bits."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_BLOCKS = 16384
"""Blocks of four words that are computed at once: their six arrays fit a cache of 1 MiB."""


def site_key(seed: int, site: str) -> Key:
    """Return the key of a site: the first 64 bits of a hash of both, as two words."""
    digest = hashlib.sha256(f"{seed}:{site}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def below(limit: float, key: Key, first: int, rows: int, count: int, device: torch.device) -> Tensor:
    """Return for each element whether its random number in [0, 1) is below `limit`.

    Args:
        limit: Probability of True. Its last bits beyond 2**-32 are dropped.
        key: Key of the site, of `site_key`.
        first: Position of the first row, from 0 to 2**62.
        rows: Number of rows.
        count: Number of elements in a row.
        device: Device of the result.

    Returns:
        A bool tensor of shape (rows, count). Element j of a row depends on the key, the position and j
        alone.
    """
    threshold = min(max(round(limit * 2**32), 0), 2**32)
    blocks = -(-count // 4)
    if device.type == "cpu":
        made = _on_cpu(key, first, rows, blocks, np.empty((rows * blocks, 4), bool), threshold)
    else:
        made = torch.stack(_on_device(key, first, rows, blocks, device), -1) < threshold
    return made.view(rows, 4 * blocks)[:, :count]


def uniform(
    key: Key, first: int, rows: int, count: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return numbers in [0, 1), of 53 bits for float64 and of 24 bits for all other dtypes.

    The arguments are those of `below`. The result is float64 or float32.
    """
    double = dtype == torch.float64
    each = 2 if double else 4
    blocks = -(-count // each)
    if device.type == "cpu":
        result = np.empty((rows * blocks, each), np.float64 if double else np.float32)
        made = _on_cpu(key, first, rows, blocks, result)
    else:
        c = _on_device(key, first, rows, blocks, device)
        if double:
            pairs = ((c[0], c[1]), (c[2], c[3]))
            c = tuple(((a >> 5).double() * 2.0**26 + (b >> 6).double()) * 2.0**-53 for a, b in pairs)
        else:
            c = tuple((word >> 8).float() * 2.0**-24 for word in c)
        made = torch.stack(c, -1)
    return made.view(rows, each * blocks)[:, :count]


def _on_cpu(
    key: Key, first: int, rows: int, blocks: int, result: np.ndarray, threshold: int | None = None
) -> Tensor:
    """Fill `result`, with one row for each block, and return it."""
    total = rows * blocks
    size = min(_BLOCKS, total)
    counters = [np.empty(size, np.uint64) for _ in range(4)]
    products = [np.empty(size, np.uint64) for _ in range(2)]
    for start in range(0, total, size):
        used = min(size, total - start)
        row, block = np.divmod(np.arange(start, start + used, dtype=np.uint64), np.uint64(blocks))
        c = [each[:used] for each in counters]
        row += np.uint64(first)
        c[0][:] = block
        c[1].fill(0)
        np.bitwise_and(row, _LOW, out=c[2])
        np.right_shift(row, 32, out=c[3])
        _rounds_on_cpu(c, [each[:used] for each in products], key)
        part = result[start : start + used]
        if threshold is not None:
            for number in range(4):
                np.less(c[number], threshold, out=part[:, number])
        elif result.dtype == np.float32:
            for number in range(4):
                part[:, number] = (c[number] >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
        else:
            for number in range(2):
                high, low = c[2 * number] >> np.uint64(5), c[2 * number + 1] >> np.uint64(6)
                part[:, number] = (high.astype(float) * 2.0**26 + low.astype(float)) * 2.0**-53
    return torch.from_numpy(result)


def _rounds_on_cpu(c: list[np.ndarray], products: list[np.ndarray], key: Key) -> None:
    p, q = products
    first, second = key
    for _ in range(_ROUNDS):
        np.multiply(c[0], _MULTIPLIERS[0], out=p)
        np.multiply(c[2], _MULTIPLIERS[1], out=q)
        for high, old, word, low, product in (
            (c[0], c[1], first, c[1], q),
            (c[2], c[3], second, c[3], p),
        ):
            np.right_shift(product, 32, out=high)
            np.bitwise_xor(high, old, out=high)
            np.bitwise_xor(high, np.uint64(word), out=high)
            np.bitwise_and(product, _LOW, out=low)
        first, second = (first + _WEYL[0]) & _LOW, (second + _WEYL[1]) & _LOW


def _on_device(
    key: Key, first: int, rows: int, blocks: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the four words of each block, as int64 tensors of shape (rows, blocks)."""
    position = torch.arange(first, first + rows, device=device).unsqueeze(1).expand(rows, blocks)
    c0 = torch.arange(blocks, device=device).expand(rows, blocks)
    c1 = torch.zeros_like(c0)
    c2, c3 = position & _LOW, position >> 32
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products of two words may exceed 2**63; int64 arithmetic keeps their bits.
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((q >> 32) & _LOW) ^ c1 ^ k0, q & _LOW
        c2, c3 = ((p >> 32) & _LOW) ^ c3 ^ k1, p & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
