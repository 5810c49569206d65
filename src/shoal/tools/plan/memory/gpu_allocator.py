"""Replay of torch's caching allocator for CUDA over the allocations of a trace.

The rules and sizes are those of torch's default settings, for one stream: pools, segments and splits of
`c10/cuda/CUDACachingAllocator.cpp`, which its first comment describes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_KIB, _MIB = 1 << 10, 1 << 20
_ROUNDING = 512
_SMALL = _MIB
"""Blocks up to this size come from small segments."""
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""Blocks from this size on have segments of their own size, rounded up to 2 MiB."""


class _Block(NamedTuple):
    """A part of a segment."""

    start: int
    size: int
    small: bool


@dataclass
class CachingAllocator:
    """Blocks of device memory, as torch's allocator divides segments into them.

    A new segment is needed if no free block is large enough. Before the allocator asks the device for
    more than it has had so far, it returns the segments that are free: `reserved` grows only if that is
    not enough, as on a device that has no more memory.

    Attributes:
        held: Bytes of all segments.
        reserved: The largest value of `held` so far.
    """

    held: int = 0
    reserved: int = 0
    _segments: dict[int, int] = field(default_factory=dict)
    """The size of each segment, by its address. No two segments are neighbours."""
    _used: dict[int, _Block] = field(default_factory=dict)
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    """The sizes and addresses of the free blocks, in order."""
    _starts: dict[int, _Block] = field(default_factory=dict)
    _ends: dict[int, _Block] = field(default_factory=dict)
    """The free blocks by their first and by their next address."""

    def allocate(self, number: int, size: int) -> None:
        """Give out a block of at least `size` bytes, known as `number`."""
        size = max(_ROUNDING, -(-size // _ROUNDING) * _ROUNDING)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._starts[free[place][1]]
            self._take(block)
        else:
            block = self._segment(size, small=small)
        rest = block.size - size
        if rest >= _ROUNDING if small else rest > _SMALL:
            self._give(_Block(block.start + size, rest, small))
            block = block._replace(size=size)
        self._used[number] = block

    def release(self, number: int) -> None:
        """Take a block back, and join it with free neighbours."""
        block = self._used.pop(number)
        for one in (self._ends.get(block.start), self._starts.get(block.start + block.size)):
            if one is not None:
                self._take(one)
                block = _Block(min(block.start, one.start), block.size + one.size, block.small)
        self._give(block)

    def _segment(self, size: int, *, small: bool) -> _Block:
        wanted = _SEGMENT if size < _OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        wanted = _SMALL_SEGMENT if small else wanted
        if self.held + wanted > self.reserved:
            for each in [*self._starts.values()]:
                if each.size == self._segments.get(each.start):
                    self._take(each)
                    self.held -= each.size
        self.held += wanted
        self.reserved = max(self.reserved, self.held)
        last = next(reversed(self._segments), 0)
        start = last + self._segments.get(last, 0) + 1
        self._segments[start] = wanted
        return _Block(start, wanted, small)

    def _give(self, block: _Block) -> None:
        self._starts[block.start] = self._ends[block.start + block.size] = block
        insort(self._free[block.small], (block.size, block.start))

    def _take(self, block: _Block) -> None:
        del self._starts[block.start], self._ends[block.start + block.size]
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.start))]


def reserved_bytes(changes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that the allocator needs from the device for a series of changes.

    A change is the number of an allocation and its bytes, above 0; or 0 for its release.
    """
    allocator = CachingAllocator()
    for number, size in changes:
        if size:
            allocator.allocate(number, size)
        else:
            allocator.release(number)
    return allocator.reserved
