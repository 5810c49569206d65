"""Bytes of the tensors of this process, counted by storage as operations allocate and free them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
