"""Philox 4x32-7, a counter-based random generator (Salmon et al. 2011), for elements of samples.

The counter of an element is the position of its sample and its indices in the sample, so it does not
depend on the sizes of the dimensions: a longer padding changes no number. On the CPU, NumPy computes
blocks that fit the cache; on other devices torch computes the same words with integer operations.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.util.errors import StepError

Word: TypeAlias = int | Tensor
"""A word of 32 bits, or a tensor of dtype int64 and shape () that holds it."""
Key: TypeAlias = tuple[Word, Word]

FORMAT = 2
"""The format of the numbers, which checkpoints name. In format 1, the number of an element depended on
the sizes of the dimensions."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
"""The fewest with which Philox passes BigCrush (Salmon et al. 2011, table 2)."""
_LOW = 0xFFFFFFFF
_CHUNK = 16384
"""Blocks of four words that are computed at once: their six arrays fit a cache of 1 MiB."""

_PLACES = ((0, 0, 24), (0, 24, 20), (0, 44, 20), (1, 44, 12), (1, 56, 8))
"""Where the indices of an element are in its counter, that of the last dimension first: the word of 64
bits, the shift and the width. The last dimension has the number of a block of elements in its place."""
POSITION_BITS = 44
"""The width of the position of a sample, in the lower bits of the second word."""
_BYTES = (0, 8, 16, 24)
"""The shifts of the bytes of a word of 32 bits."""


class RowIndex(NamedTuple):
    """Rows of which each belongs to any sample: the sample of each row and its place in it.

    `samples` and `places` are int64 tensors of one element for each row. No place exceeds `last`.
    """

    samples: Tensor
    places: Tensor
    last: int


class Rows(NamedTuple):
    """The rows of a draw: one for each of `number` samples from the position `first` on.

    `first` is a tensor, as the key, if it is on another device than the CPU. With `rows`, it is the
    position of sample 0, and there are `number` rows of any samples.
    """

    first: Word
    number: int
    rows: RowIndex | None = None


class Slice(NamedTuple):
    """A slice of a tensor, or of each row of it: the sizes and the first indices of its dimensions."""

    sizes: tuple[int, ...]
    first: tuple[int, ...]


def complete(sizes: Sequence[int]) -> Slice:
    """Return the slice that is all of a tensor."""
    return Slice(tuple(sizes), (0,) * len(sizes))


def site_key(seed: int, site: str) -> Key:
    """Return the key of a site: the first 64 bits of a hash of both, as two words."""
    digest = hashlib.sha256(f"{seed}:{site}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def next_key(key: tuple[Any, Any], number: int = 1) -> tuple[Any, Any]:
    """Return the key of one more of the numbers that an element has."""
    return key[0], (key[1] + number) & _LOW


def below(limit: float, key: Key, rows: Rows, part: Slice, device: torch.device) -> Tensor:
    """Return for each element whether its random number in [0, 1) is below `limit`.

    The number has 32 bits, of which the first 8 decide for 255 of 256 elements. A block of words has
    these for 16 elements; the other 24 are those of `uniform` with the next key.

    Args:
        limit: Probability of True. Its last bits beyond 2**-32 are dropped.
        key: Key of the site, of `site_key`.
        rows: The rows.
        part: The slice that is drawn of each row.
        device: Device of the result.

    Returns:
        A bool tensor of shape (rows, *part.sizes). An element depends on the key, the position of its
        sample and its indices in the sample alone.

    Raises:
        StepError: If an index is too large for the counter.
    """
    end = threshold(limit)
    if end in (0, 1 << 32):
        return torch.full((rows.number, *part.sizes), end > 0, device=device)
    _check_sizes(part, rows, 4)
    counters = _Counters(rows, part, 16, device)
    if counters.on_cpu:
        made = _below_on_cpu(end, key, counters)
    else:
        words = torch.stack(words_of(key, counters.low, counters.high), -1)
        first = torch.stack([(words >> shift) & 0xFF for shift in _BYTES], -1).flatten(-3)
        others = _Counters(rows, part, 4, device)
        last = torch.stack(words_of(next_key(key), others.low, others.high), -1).flatten(-2) >> 8
        return (counters.chosen(first) << 24) + others.chosen(last) < end
    return counters.chosen(made)


def uniform(
    key: Key, rows: Rows, part: Slice, device: torch.device, dtype: torch.dtype, number: int = 0
) -> Tensor:
    """Return numbers in [0, 1), of 53 bits for float64 and of 24 bits for all other dtypes.

    The other arguments, the shape and the errors are those of `below`. An element has any `number` of
    numbers. The result is float64 or float32.
    """
    double = dtype == torch.float64
    each = 2 if double else 4
    _check_sizes(part, rows, each)
    key = next_key(key, number)
    counters = _Counters(rows, part, each, device)
    if counters.on_cpu:
        made = _uniform_on_cpu(key, counters, double=double)
    else:
        found = integers(words_of(key, counters.low, counters.high), double=double)
        whole = torch.stack(found, -1).flatten(-2)
        made = whole.to(torch.float64 if double else torch.float32) * UNITS[double]
    return counters.chosen(made)


UNITS = (2.0**-24, 2.0**-53)
"""The distance of neighboring numbers of `uniform`, for float32 and float64."""


def threshold(limit: float) -> int:
    """Return the number of words that are below a limit for numbers in [0, 1)."""
    return min(max(round(limit * 2**32), 0), 2**32)


def packed(words: Sequence[Any], others: Sequence[Any], place: Any, limit: float) -> Any:
    """Return an integer with a byte for each of four elements: 1 if its number is below `limit`.

    `words` is the block of their first bits, in which they have the word `place`, and `others` that of
    their last bits.
    """
    end, first = threshold(limit), chosen([*words], place)
    found = None
    for shift, word in zip(_BYTES, others, strict=True):
        number = (((first >> shift) & 0xFF) * (1 << 24)) | (word >> 8)
        bit = ((number - end) >> 63) & (1 << shift)
        found = bit if found is None else found | bit
    return found


def integers(words: Sequence[Any], *, double: bool) -> list[Any]:
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


def counter(position: Any, block: Any, outer: Sequence[Any]) -> tuple[Any, Any]:
    """Return the two words of 64 bits of a counter.

    `block` is the number of the block along the last dimension, and `outer` the indices of the other
    dimensions. Dimensions that no place is left for have one element.
    """
    words = [block, position]
    for index, (word, shift, _) in zip(reversed(outer), _PLACES[1:], strict=False):
        words[word] = words[word] + index * (1 << shift)
    return words[0], words[1]


class _Counters:
    """The counters of the blocks of a draw, of `each` elements, as `low` and `high` of 64 bits.

    On the CPU they are flat NumPy arrays, on other devices tensors that broadcast to (rows, …, blocks).
    """

    def __init__(self, rows: Rows, part: Slice, each: int, device: torch.device) -> None:
        sizes, first = (part.sizes or (1,)), (part.first or (0,))
        start, stop = first[-1] // each, -(-(first[-1] + sizes[-1]) // each)
        ranges = [*itertools.starmap(_indices, zip(first[:-1], sizes[:-1], strict=True))]
        ranges.append(range(start, stop))
        dims = len(ranges)
        *outer, block = (
            torch.arange(one.start, one.stop, device=device).view(-1, *[1] * (dims - 1 - dim))
            for dim, one in enumerate(ranges)
        )
        sample = torch.arange(rows.number, device=device)
        if rows.rows is not None:
            sample, place = (each.to(device) for each in rows.rows[:2])
            outer.insert(0, place.view(-1, *[1] * dims))
        low, high = counter(sample.view(-1, *[1] * dims) + rows.first, block, outer)
        self._shape = (rows.number, *map(len, ranges))
        self._sizes = (rows.number, *part.sizes)
        self._columns = slice(first[-1] - start * each, first[-1] - start * each + sizes[-1])
        self.on_cpu = device.type == "cpu" and isinstance(rows.first, int)
        self.low, self.high = low, high
        if self.on_cpu:
            self.low, self.high = (
                each.expand(self._shape).reshape(-1).numpy().view(np.uint64) for each in (low, high)
            )

    def chosen(self, elements: Tensor) -> Tensor:
        """Return the elements that are drawn, of those of all blocks."""
        found = elements.reshape(*self._shape[:-1], -1)[..., self._columns]
        return found.reshape(self._sizes)


def _indices(first: int, size: int) -> range:
    return range(first, first + size)


def _check_sizes(part: Slice, rows: Rows, each: int) -> None:
    """Raise StepError if a dimension does not fit its place in the counter."""
    last = [at + size - 1 for at, size in zip(part.first, part.sizes, strict=True)] or [0]
    last[-1] //= each
    if rows.rows is not None:
        last.insert(0, rows.rows.last)
    widths = itertools.chain((place[2] for place in _PLACES), itertools.repeat(0))
    if any(index >> width for index, width in zip(reversed(last), widths, strict=False)):
        sizes = ", ".join(f"2**{width}" for _, _, width in reversed(_PLACES))
        raise StepError(
            given=f"a random draw with {tuple(part.sizes)} elements for each sample",
            found=f"beyond five dimensions, or larger than {sizes}, the last in blocks of {each}",
            fix="flatten the dimensions before the last, or shoal.parallelize(…, random='ranks')",
        )


def _below_on_cpu(end: int, key: Any, counters: _Counters) -> Tensor:
    words = np.empty((len(counters.low), 4), "<u4")
    for chunk, c in _words_on_cpu(key, counters.low, counters.high):
        for number in range(4):
            words[chunk, number] = c[number]
    first = words.view(np.uint8)
    result = first < (end >> 24)
    rest = end & 0xFFFFFF
    if rest:  # otherwise the first bits decide for all
        undecided = np.flatnonzero(first == end >> 24)
        block, element = np.divmod(undecided.astype(np.uint64), np.uint64(16))
        low, high = counters.low[block], counters.high[block]
        low += 3 * (low & np.uint64(0xFFFFFF)) + (element >> np.uint64(2))  # its block of 4 elements
        decided = result.reshape(-1)
        for chunk, c in _words_on_cpu(next_key(key), low, high):
            word = np.choose((element[chunk] & np.uint64(3)).astype(np.intp), c)
            decided[undecided[chunk]] = word >> np.uint64(8) < rest
    return torch.from_numpy(result)


def _uniform_on_cpu(key: Any, counters: _Counters, *, double: bool) -> Tensor:
    size = len(counters.low), 2 if double else 4
    result = np.empty(size, np.float64 if double else np.float32)
    for chunk, c in _words_on_cpu(key, counters.low, counters.high):
        for number in range(size[1]):
            if double:
                high, low = c[2 * number] >> np.uint64(5), c[2 * number + 1] >> np.uint64(6)
                result[chunk, number] = (high.astype(float) * 2.0**26 + low.astype(float)) * 2.0**-53
            else:
                word = (c[number] >> np.uint64(8)).astype(np.float32)
                result[chunk, number] = word * np.float32(2**-24)
    return torch.from_numpy(result)


def _words_on_cpu(
    key: Any, low: np.ndarray, high: np.ndarray
) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """Yield slices of counters and their four words, in arrays that the next slice overwrites."""
    size = min(_CHUNK, len(low))
    words = [np.empty(size, np.uint64) for _ in range(4)]
    products = [np.empty(size, np.uint64) for _ in range(2)]
    for start in range(0, len(low), _CHUNK):
        chunk = slice(start, min(start + _CHUNK, len(low)))
        c = [each[: chunk.stop - start] for each in words]
        for place, counter in ((0, low[chunk]), (2, high[chunk])):
            np.bitwise_and(counter, _LOW, out=c[place])
            np.right_shift(counter, 32, out=c[place + 1])
        _rounds_on_cpu(c, [each[: chunk.stop - start] for each in products], key)
        yield chunk, c


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


def words_of(key: tuple[Any, Any], low: Any, high: Any) -> tuple[Any, Any, Any, Any]:
    """Return the four words of the block of a counter, in int64 arithmetic.

    The arguments are tensors, or all other objects that have its operators.
    """
    c0, c1, c2, c3 = low & _LOW, low >> 32, high & _LOW, high >> 32
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products of two words may exceed 2**63; int64 arithmetic keeps their bits. Of c1, c3 and the
        # key, the bits above the 32 of a word are dropped with those of the products.
        p, q = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((q >> 32) ^ c1 ^ k0) & _LOW, q
        c2, c3 = ((p >> 32) ^ c3 ^ k1) & _LOW, p
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1 & _LOW, c2, c3 & _LOW
