"""Safetensors files, of which each rank reads only the bytes that it keeps.

Bytes are read by `pread` and not by mapping the file: pages of a mapped file count as memory of the
process, and a rank that keeps half of a tensor would still touch most of its pages.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.object_store import RemotePath
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.state_tree import DTYPES

BLOCK = 8 << 20
"""Bytes that are read at a time if they are not read into their place."""
RUN = 4096
"""Adjacent bytes from which a run is read alone; shorter ones are cut from full rows."""
LARGEST_HEADER = 100_000_000
"""Bytes of the longest header that the format allows."""

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
KINDS = {name: dtype for dtype, name in DTYPES.items() if not dtype.is_complex} | {
    "C64": torch.complex64
}
"""The dtypes by the names that the format has for them."""


def on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this form without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


class FormatError(ValueError):
    """A file that is not a complete safetensors file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its kind in the words of the format, its shape, and its first byte."""

    path: AnyPath
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return KINDS[self.kind]

    def whole(self) -> Tensor:
        """Read all of it."""
        made = torch.empty(self.shape, dtype=self.dtype)
        self.read(tuple(slice(0, size) for size in self.shape), made)
        return made

    def read(self, slices: Sequence[slice], target: Tensor) -> None:
        """Read the part within `slices`, one for each dimension, into a contiguous CPU tensor.

        `target` has the dtype of the file and the shape of the part.
        """
        if not target.numel():
            return
        place = bytes_of(target)
        cut = [at for at, one in enumerate(slices) if _length(one) < self.shape[at]]
        inner = max(cut, default=0)
        with _Reader(self.path) as file:
            if inner == 0:
                row = math.prod(self.shape[1:]) * self.dtype.itemsize
                first = slices[0].start * row if slices else 0
                file.read(self.start + first, place)
                return
            run = _length(slices[inner]) * math.prod(self.shape[inner + 1 :]) * self.dtype.itemsize
            if run >= RUN and file.local:
                for number, at in enumerate(self._runs(slices, inner)):
                    file.read(at, place[number * run : (number + 1) * run])
            else:
                self._cut_rows(file, slices, target)

    def _runs(self, slices: Sequence[slice], inner: int) -> Iterator[int]:
        """Return the first byte of each run of adjacent elements in the file, in their order."""
        steps = [math.prod(self.shape[at + 1 :]) * self.dtype.itemsize for at in range(inner + 1)]
        offset = self.start + slices[inner].start * steps[inner]
        for index in itertools.product(*(range(one.start, one.stop) for one in slices[:inner])):
            yield offset + sum(at * step for at, step in zip(index, steps, strict=False))

    def _cut_rows(self, file: _Reader, slices: Sequence[slice], target: Tensor) -> None:
        """Read full rows of the first dimension, and copy the slices of them."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        for begin, end in blocks(slices[0].start, slices[0].stop, row):
            rows = torch.empty((end - begin, *self.shape[1:]), dtype=self.dtype)
            file.read(self.start + begin * row, bytes_of(rows))
            done = begin - slices[0].start
            target[done : done + end - begin].copy_(rows[(slice(None), *slices[1:])])


def blocks(first: int, last: int, row: int) -> Iterator[tuple[int, int]]:
    """Return ranges of rows of `row` bytes each that take about BLOCK bytes together."""
    step = max(1, BLOCK // max(1, row))
    return ((at, min(at + step, last)) for at in range(first, last, step))


class _Reader:
    """An open file, from which ranges of bytes are read into buffers."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self.local = isinstance(path, Path)
        self._descriptor = -1

    def __enter__(self) -> _Reader:
        if isinstance(self._path, Path):
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, at: int, place: memoryview) -> None:
        """Fill `place` with the bytes from `at`. Raises FormatError if the file ends before."""
        if isinstance(self._path, RemotePath):
            for begin, end in blocks(0, len(place), 1):
                data = self._path.read_range(at + begin, at + end)
                if len(data) != end - begin:
                    raise FormatError(f"{self._path} ends before byte {at + end:,}")
                place[begin:end] = data
            return
        done = 0
        while done < len(place):
            got = os.preadv(self._descriptor, [place[done:]], at + done)
            if not got:
                raise FormatError(f"{self._path} ends at byte {at + done:,}, and more is needed")
            done += got


def _length(one: slice) -> int:
    return int(one.stop - one.start)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    place: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(place)


def read_header(path: AnyPath) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises FormatError if the file is none, is cut off, or has tensors of another size than it says; and
    OSError if it can't be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size if isinstance(path, Path) else path.size()
    if size < 8:
        raise FormatError(f"{path} has {size} bytes, fewer than the length of a header")
    with _Reader(path) as file:
        head = memoryview(bytearray(8))
        file.read(0, head)
        length = int.from_bytes(head, "little")
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise FormatError(f"{path} has {size:,} bytes, and no complete safetensors header")
        text = memoryview(bytearray(length))
        file.read(8, text)
    try:
        rows = json.loads(bytes(text))
        rows.pop("__metadata__", None)
        found = {str(name): _stored(path, row, 8 + length) for name, row in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"the header of {path} is damaged ({type(error).__name__})") from None
    ends = [(name, one.start + _size_of(rows[name])) for name, one in found.items()]
    for name, end in ends:
        if end > size:
            raise FormatError(f"{path} has {size:,} bytes, and {name} would end at byte {end:,}")
    return found


def _stored(path: AnyPath, row: Mapping[str, Any], base: int) -> StoredTensor:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    numbers = (begin, end, *shape)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a shape or an offset is not an integer")
    stored = StoredTensor(path, str(row["dtype"]), shape, base + begin)
    known = KINDS.get(stored.kind)
    if end < begin or (known is not None and math.prod(shape) * known.itemsize != end - begin):
        raise ValueError("a tensor has another size than its shape and dtype")
    return stored


def _size_of(row: Mapping[str, Any]) -> int:
    begin, end = row["data_offsets"]
    return int(end - begin)
