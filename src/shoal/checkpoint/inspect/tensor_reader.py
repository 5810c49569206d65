"""Reading of complete tensors of one checkpoint, or of parts, however they were sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.inspect.manifest import CheckpointManifest
from shoal.checkpoint.paths import local_file
from shoal.checkpoint.store import DamageError
from shoal.checkpoint.tensor_index import Chunk, TensorEntry
from shoal.checkpoint.tensors import read_piece
from shoal.util.errors import CheckpointError, raised_as

DeviceSpan = tuple[int, int]
"""Start and end on one axis."""


class TensorFiles(ExitStack):
    """The open files of a checkpoint. Pages are read on demand, and freed when memory is short.

    Remote files are copies, which are removed at the end.
    """

    def __init__(self, contents: CheckpointManifest) -> None:
        super().__init__()
        self._contents = contents
        self._open: dict[str, Any] = {}

    def whole(self, name: str) -> Tensor:
        """Return one tensor. It may share memory with the file: copy it to keep or change it."""
        return self.part(name, [(0, size) for size in self._contents.tensors[name].shape])

    def part(self, name: str, spans: Sequence[DeviceSpan]) -> Tensor:
        """Return a part of a tensor from the chunks that contain it.

        Raises CheckpointError if a file does not hold the data that the table describes.
        """
        row = self._contents.tensors[name]
        with raised_as(
            CheckpointError,
            given=f"{name} of the checkpoint {self._contents.path}",
            fix=f"shoal checkpoint verify {self._contents.path}",
            errors=(SafetensorError, OSError, DamageError),
        ):
            pieces = list(self._pieces(row, spans))
        if len(pieces) == 1:
            return pieces[0][1]
        joined = torch.empty([end - start for start, end in spans], dtype=getattr(torch, row.dtype))
        for where, piece in pieces:
            joined[where] = piece
        return joined

    def _pieces(
        self, row: TensorEntry, spans: Sequence[DeviceSpan]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield the overlap of each chunk with a part, and its place in the part."""
        for chunk in row.chunks:
            ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            common = [
                (max(start, at), min(stop, end))
                for (start, stop), at, end in zip(spans, chunk.offsets, ends, strict=True)
            ]
            if len(row.chunks) > 1 and any(start >= stop for start, stop in common):
                continue
            where = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(common, spans, strict=True)
            )
            yield where, self._read(row, chunk, common)

    def _read(self, row: TensorEntry, chunk: Chunk, spans: Sequence[DeviceSpan]) -> Tensor:
        inside = [(a - at, b - at) for (a, b), at in zip(spans, chunk.offsets, strict=True)]
        return read_piece(self._file(chunk.file), chunk.key, chunk.sizes, inside, row.dtype)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.enter_context(local_file(self._contents.path / name))
            opened = safe_open(path, framework="pt", device="cpu")
            self._open[name] = self.enter_context(opened)
        return self._open[name]


def blocks(row: TensorEntry, most: int) -> Iterator[list[DeviceSpan]]:
    """Yield the parts of a tensor, each of at most `most` bytes or of one row of its first axis."""
    rest = [(0, size) for size in row.shape[1:]]
    if not row.shape or not row.bytes:
        yield [(0, size) for size in row.shape]
        return
    rows = max(1, most // (row.bytes // row.shape[0]))
    for start in range(0, row.shape[0], rows):
        yield [(start, min(start + rows, row.shape[0])), *rest]
