"""Philox 4x32-10, a counter-based random generator (Salmon et al. 2011), for rows of consecutive keys.

Each row belongs to one sample. On the CPU, NumPy computes blocks that fit the cache; on other devices
torch computes the same words with integer operations.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Word: TypeAlias = int | Tensor
"""A word of 32 bits, or a tensor of dtype int64 and shape () that holds it."""
Key: TypeAlias = tuple[Word, Word]
Blocks: TypeAlias = slice | np.ndarray
"""Blocks of four words of a row: consecutive ones, or their numbers."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_BLOCKS = 16384
"""Blocks of four words that are computed at once: their six arrays fit a cache of 1 MiB."""


class Slice(NamedTuple):
    """A slice of each row: the sizes and the first indices of its dimensions, and the full sizes."""

    sizes: tuple[int, ...]
    first: tuple[int, ...]
    full: tuple[int, ...]


def site_key(seed: int, site: str) -> Key:
    """Return the key of a site: the first 64 bits of a hash of both, as two words."""
    digest = hashlib.sha256(f"{seed}:{site}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def below(
    limit: float,
    key: Key,
    first: Word,
    rows: int,
    count: int,
    device: torch.device,
    part: Slice | None = None,
) -> Tensor:
    """Return for each element whether its random number in [0, 1) is below `limit`.

    Args:
        limit: Probability of True. Its last bits beyond 2**-32 are dropped.
        key: Key of the site, of `site_key`.
        first: Position of the first row, from 0 to 2**62. A tensor, as in the key, if it is on another
            device than the CPU.
        rows: Number of rows.
        count: Number of elements in a row.
        device: Device of the result.
        part: The slice of the row that the `count` elements are, in row-major order. None means that
            they begin with element 0.

    Returns:
        A bool tensor of shape (rows, count). Element j of a row depends on the key, the position and j
        alone.
    """
    blocks, columns = _elements(count, 4, part)
    length = _number(blocks)
    if device.type == "cpu" and isinstance(first, int):
        result = np.empty((rows * length, 4), bool)
        made = _on_cpu(key, first, rows, blocks, result, threshold(limit))
    else:
        made = packed(_on_device(key, first, rows, blocks, device), limit).int().view(torch.bool)
    return _chosen(made.view(rows, 4 * length), columns)


def threshold(limit: float) -> int:
    """Return the number of words that are below a limit for numbers in [0, 1)."""
    return min(max(round(limit * 2**32), 0), 2**32)


def packed(words: tuple[Any, ...], limit: float) -> Any:
    """Return 1 in each byte of an integer whose word, of four, is below `limit`, else 0."""
    end = threshold(limit)
    first, second, third, fourth = (
        ((word - end) >> 63) & (1 << 8 * place) for place, word in enumerate(words)
    )
    return first | second | third | fourth


def uniform(
    key: Key,
    first: Word,
    rows: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    part: Slice | None = None,
) -> Tensor:
    """Return numbers in [0, 1), of 53 bits for float64 and of 24 bits for all other dtypes.

    The arguments are those of `below`. The result is float64 or float32.
    """
    double = dtype == torch.float64
    each = 2 if double else 4
    blocks, columns = _elements(count, each, part)
    length = _number(blocks)
    if device.type == "cpu" and isinstance(first, int):
        result = np.empty((rows * length, each), np.float64 if double else np.float32)
        made = _on_cpu(key, first, rows, blocks, result)
    else:
        found = integers(_on_device(key, first, rows, blocks, device), double=double)
        made = torch.stack(found, -1).to(torch.float64 if double else torch.float32) * UNITS[double]
    return _chosen(made.view(rows, each * length), columns)


UNITS = (2.0**-24, 2.0**-53)
"""The distance of neighboring numbers of `uniform`, for float32 and float64."""


def integers(words: tuple[Any, ...], *, double: bool) -> list[Any]:
    """Return the numbers of `uniform` that four words are, in units of `UNITS[double]`."""
    if double:
        return [(words[at] >> 5) * 2**26 + (words[at + 1] >> 6) for at in (0, 2)]
    return [word >> 8 for word in words]


def chosen(values: list[Any], place: Any) -> Any:
    """Return one of 2**n integers by its place, without a branch."""
    while len(values) > 1:
        mask = (place & 1) * -1
        values = [a ^ ((a ^ b) & mask) for a, b in zip(values[::2], values[1::2], strict=True)]
        place = place >> 1
    return values[0]


def _number(blocks: Blocks) -> int:
    return blocks.stop - blocks.start if isinstance(blocks, slice) else len(blocks)


def _elements(count: int, each: int, part: Slice | None) -> tuple[Blocks, slice | np.ndarray]:
    """Return the blocks of a row that hold its elements, and the columns of these blocks that they are.

    A block holds `each` elements.
    """
    if part is None:
        return slice(0, -(-count // each)), slice(count)
    inner = part.sizes[_outer_dimensions(part) :]
    if math.prod(inner) == count:  # consecutive elements
        start = _index_of_first(part)
        block = start // each
        return slice(block, -(-(start + count) // each)), slice(
            start - block * each, start - block * each + count
        )
    index: np.ndarray = np.zeros((), np.int64)
    for size, first, full in zip(*part, strict=True):
        index = index[..., None] * full + np.arange(first, first + size)
    index = index.reshape(-1)
    numbers = index // each
    new = np.diff(numbers, prepend=-1) != 0
    return numbers[new], (np.cumsum(new) - 1) * each + index % each


def _outer_dimensions(part: Slice) -> int:
    """Return the number of dimensions before those whose elements are consecutive in the row."""
    dim = len(part.sizes)
    while dim and part.sizes[dim - 1] == part.full[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


def _index_of_first(part: Slice) -> int:
    start = 0
    for first, full in zip(part.first, part.full, strict=True):
        start = start * full + first
    return start


def _chosen(made: Tensor, columns: slice | np.ndarray) -> Tensor:
    if isinstance(columns, slice):
        return made[:, columns]
    return made.index_select(1, torch.from_numpy(columns).to(made.device))


def _on_cpu(
    key: Key,
    first: int,
    rows: int,
    blocks: Blocks,
    result: np.ndarray,
    threshold: int | None = None,
) -> Tensor:
    """Fill `result`, with one row for each block, and return it."""
    length = _number(blocks)
    total = rows * length
    size = min(_BLOCKS, total)
    counters = [np.empty(size, np.uint64) for _ in range(4)]
    products = [np.empty(size, np.uint64) for _ in range(2)]
    for start in range(0, total, size):
        used = min(size, total - start)
        row, block = np.divmod(np.arange(start, start + used, dtype=np.uint64), np.uint64(length))
        c = [each[:used] for each in counters]
        row += np.uint64(first)
        if isinstance(blocks, slice):
            np.add(block, np.uint64(blocks.start), out=c[0])
        else:
            c[0][:] = blocks[block.astype(np.intp)]
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
    key: Key, first: Word, rows: int, blocks: Blocks, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the four words of each block, as int64 tensors of shape (rows, blocks)."""
    if isinstance(blocks, slice):
        block = torch.arange(blocks.start, blocks.stop, device=device)
    else:
        block = torch.from_numpy(blocks).to(device)
    return words_of(key, torch.arange(rows, device=device).unsqueeze(1) + first, block)


def words_of(key: tuple[Any, Any], position: Any, block: Any) -> tuple[Any, Any, Any, Any]:
    """Return the four words of a block of the row of a position, in int64 arithmetic.

    The arguments are tensors, or all other objects that have its operators.
    """
    c0, c1, c2, c3 = block, 0, position & _LOW, position >> 32
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products of two words may exceed 2**63; int64 arithmetic keeps their bits. Of c1, c3 and the
        # key, the bits above the 32 of a word are dropped with those of the products.
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((q >> 32) ^ c1 ^ k0) & _LOW, q
        c2, c3 = ((p >> 32) ^ c3 ^ k1) & _LOW, p
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1 & _LOW, c2, c3 & _LOW
