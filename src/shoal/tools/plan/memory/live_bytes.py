"""Bytes of the tensors of this process, counted by storage as operations allocate and free them.

`reserved_bytes` replays torch's caching allocator for CUDA over the allocations of a trace. The rules
and sizes are those of torch's default settings, for one stream: pools, segments and splits of
`c10/cuda/CUDACachingAllocator.cpp`, which its first comment describes.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal._torch.autograd import storage_key
from shoal._torch.dispatch import UncompiledMode, is_wrapper, tree_iter

_COLLECTIVE = ("_c10d_functional", "fsdp")
"""The namespaces of the operations that read or write buffers of collectives."""


class PeakStorage(NamedTuple):
    """A storage when memory was at its peak.

    `moment` is the moment at which it was first seen. `shared` says whether a collective used it.
    """

    size: int
    moment: str
    shared: bool


class _Storage:
    """A storage that lives. `number` is its own, unlike the address, which is used again.

    `allocation` is the number of its memory, which changes with its size.
    """

    __slots__ = ("allocation", "moment", "number", "reference", "shared", "size")

    def __init__(self, number: int, moment: str, reference: object) -> None:
        self.number, self.moment, self.reference = number, moment, reference
        self.size = self.allocation = 0
        self.shared = False


class LiveBytes(UncompiledMode):
    """Dispatch mode that counts the bytes of all storages that operations have seen and that live.

    It sees a tensor when an operation returns or receives it. Memory that a kernel allocates and frees
    itself is not counted. `moment` describes the current moment.

    Attributes:
        total: Bytes of all storages that live.
        peak: The largest value of `total` since `restart`.
        changes: Each allocation as its number and its bytes, and each release as the number and 0.
    """

    def __init__(self, moment: Callable[[], str]) -> None:
        super().__init__()
        self.total = self.peak = 0
        self.changes: list[tuple[int, int]] = []
        self.at_peak: dict[int, PeakStorage] = {}
        """The storages that lived at the peak by number, if it reached the threshold of `restart`."""
        self.peak_moment = ""
        self._moment = moment
        self._threshold = 0.0
        self._seen = 0
        self._living: dict[int, _Storage] = {}

    def restart(self, threshold: float) -> None:
        """Look for the peak again, and keep the storages of a peak of `threshold` bytes or more."""
        self.peak, self._threshold = 0, threshold
        self.at_peak = {}
        self._note_peak()

    def watch(self, tensors: Iterable[Any], *, counted: bool = True) -> None:
        """Know tensors that no operation has seen, and count their bytes unless `counted` is false."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._add(tensor, counted=counted)
        self._note_peak()

    def number(self, tensor: Tensor) -> int:
        """Return the number of the storage of a tensor, the key of `at_peak`; -1 if it is unknown."""
        found = self._living.get(storage_key(tensor))
        return -1 if found is None else found.number

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation and count the tensors that it returns."""
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operations on the tensors inside come next
        named = named or {}
        shared = function.namespace in _COLLECTIVE
        given = [each for each in tree_iter((arguments, named)) if isinstance(each, Tensor)]
        for tensor in given:
            self._add(tensor, shared=shared)
        result = function(*arguments, **named)
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self._add(each, shared=shared)
        self._note_peak()
        return result

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Count storages whose size changes, as those of parameters that FSDP gathers and frees."""
        own = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = own(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]

    def _add(self, tensor: Tensor, *, shared: bool = False, counted: bool = True) -> None:
        if is_wrapper(type(tensor)):
            return
        key = storage_key(tensor)
        found = self._living.get(key)
        if found is None:
            storage = tensor.untyped_storage()
            size = storage.nbytes() if counted and tensor.device.type != "meta" else 0
            reference = weakref.ref(storage, lambda _: self._free(key))
            self._living[key] = found = _Storage(self._seen, self._moment(), reference)
            self._seen += 1
            self._change(found, size)
        found.shared |= shared

    def _free(self, key: int) -> None:
        self._change(self._living.pop(key), 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        found = self._living.get(storage_key(storage))
        if found is not None:
            self._change(found, storage.nbytes())
            found.shared = True
            self._note_peak()

    def _change(self, storage: _Storage, size: int) -> None:
        if storage.size:
            self.changes.append((storage.allocation, 0))
        self.total += size - storage.size
        storage.size = size
        if size:
            storage.allocation = len(self.changes)
            self.changes.append((storage.allocation, size))

    def _note_peak(self) -> None:
        if self.total <= self.peak:
            return
        self.peak = self.total
        if self.peak >= self._threshold > 0:
            self.peak_moment = self._moment()
            self.at_peak = {
                each.number: PeakStorage(each.size, each.moment, each.shared)
                for each in self._living.values()
            }


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
