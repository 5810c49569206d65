"""Replay of torch's caching allocator for CUDA over the allocations of a trace.

The rules and sizes are those of torch's default settings, for one stream: pools, segments and splits of
`c10/cuda/CUDACachingAllocator.cpp`, which its first comment describes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

_KIB, _MIB = 1 << 10, 1 << 20
_ROUNDING = 512
_SMALL = _MIB
"""Blocks up to this size come from small segments."""
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""Blocks from this size on have segments of their own size, rounded up to 2 MiB."""


@dataclass(eq=False)
class _Block:
    """A part of a segment, with its neighbours in it."""

    start: int
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of free blocks: by size, then by address."""
        return self.size, self.start


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
    _addresses: int = 0
    _used: dict[int, _Block] = field(default_factory=dict)
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _at: dict[int, _Block] = field(default_factory=dict)
    """The free blocks by address."""

    def allocate(self, number: int, size: int) -> None:
        """Give out a block of at least `size` bytes, known as `number`."""
        size = max(_ROUNDING, -(-size // _ROUNDING) * _ROUNDING)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._at[free[place][1]]
            self._take(block)
        else:
            block = self._segment(size, small=small)
        rest = block.size - size
        if rest >= _ROUNDING if small else rest > _SMALL:
            other = _Block(block.start + size, rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.size, block.after = size, other
            self._give(other)
        self._used[number] = block

    def release(self, number: int) -> None:
        """Take a block back, and join it with free neighbours."""
        block = self._used.pop(number)
        for one in (block.before, block.after):
            if one is None or not one.free:
                continue
            self._take(one)
            first, second = (one, block) if one is block.before else (block, one)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._give(block)

    def _segment(self, size: int, *, small: bool) -> _Block:
        if small:
            wanted = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            wanted = _SEGMENT
        else:
            wanted = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self.held + wanted > self.reserved:
            for block in [each for each in self._at.values() if each.before is each.after is None]:
                self._take(block)
                self.held -= block.size
        self.held += wanted
        self.reserved = max(self.reserved, self.held)
        block = _Block(self._addresses, wanted, small)
        self._addresses += wanted
        return block

    def _give(self, block: _Block) -> None:
        block.free = True
        self._at[block.start] = block
        insort(self._free[block.small], block.key)

    def _take(self, block: _Block) -> None:
        block.free = False
        del self._at[block.start]
        free = self._free[block.small]
        del free[bisect_left(free, block.key)]


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
