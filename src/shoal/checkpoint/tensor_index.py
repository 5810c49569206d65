"""The table of a checkpoint's tensors in `state.json`, and the check that it is valid.

A SHA-256 shows damage, not malice: an attacker who can write files can write their checksums. The
complete table is therefore checked before a tensor is allocated or a file is opened from it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.store import DamageError, FileRecord, Manifest

STATE = "state.json"

BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""The dtypes that a tensor may have, by torch's names, with the bytes of an element."""

_MOST_AXES = 64  # torch's own limit


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offsets and sizes in the tensor, and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its dtype by torch's name, its shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """The size of the complete tensor."""
        return math.prod(self.shape) * BYTES[self.dtype]


def read_tensor_index(raw: bytes, manifest: Manifest) -> dict[str, Any]:
    """Return the contents of `state.json`, with its table checked against the manifest.

    Raises DamageError if they can't be those of a checkpoint.
    """
    if STATE not in manifest.files:
        raise DamageError(f"its manifest names no {STATE}")
    try:
        content = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_number)
        ranks = content["rank_state"]
        if not isinstance(ranks, list) or len(ranks) != manifest.world_size or "state" not in content:
            raise DamageError(f"{STATE} has no state of {manifest.world_size} ranks")
        rows(content, manifest.files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamageError(
            f"{STATE} is not what Shoal writes: {type(error).__name__}: {error}"
        ) from None
    return content  # type: ignore[no-any-return]


def rows(content: Mapping[str, Any], files: Mapping[str, FileRecord]) -> dict[str, TensorEntry]:
    """Return the table of the contents that `read_tensor_index` returned.

    Raises DamageError for a table that no tensors can have.
    """
    table = {name: _row(name, row) for name, row in content["tensors"].items()}
    held: Counter[str] = Counter()
    for name, row in table.items():
        for chunk in row.chunks:
            held[chunk.file] += math.prod(chunk.sizes) * BYTES[row.dtype]
        if math.prod(row.shape) and not _fill(row):
            raise _impossible(name, "its chunks overlap, leave gaps or lie outside of it")
    for file, size in held.items():
        if file not in files:
            raise DamageError(f"{STATE} names {file!r}, which the manifest does not")
        if size > files[file].bytes:
            raise DamageError(f"{STATE} has {size:,} bytes in {file}, of {files[file].bytes:,}")
    return table


def _row(name: str, row: Any) -> TensorEntry:
    if row["dtype"] not in BYTES:
        raise _impossible(name, "its dtype is unknown")
    shape = _sizes(name, row["shape"])
    if math.prod(size or 1 for size in shape) * BYTES[row["dtype"]] >= 2**63:
        raise _impossible(name, "it is larger than any memory")
    chunks = tuple(
        Chunk(_sizes(name, each["offsets"]), _sizes(name, each["sizes"]), each["file"], each["key"])
        for each in row["chunks"]
    )
    if not all(isinstance(text, str) for chunk in chunks for text in (chunk.file, chunk.key)):
        raise _impossible(name, "its chunks are in no file")
    if not all(len(chunk.offsets) == len(chunk.sizes) == len(shape) for chunk in chunks):
        raise _impossible(name, "its chunks have other dimensions")
    return TensorEntry(row["dtype"], shape, chunks)


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    good = isinstance(given, list) and len(given) <= _MOST_AXES
    if not good or not all(type(size) is int and 0 <= size < 2**63 for size in given):
        raise _impossible(name, "its sizes are not integers")
    return tuple(given)


def _impossible(name: str, why: str) -> DamageError:
    return DamageError(f"{STATE} describes the tensor {name!r} that can't be: {why}")


Box = tuple[tuple[int, int], ...]
"""Start and end on each axis."""


def _fill(row: TensorEntry) -> bool:
    """Return whether the chunks fill the tensor exactly, without overlaps or gaps."""
    boxes = [
        tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in row.chunks
        if math.prod(chunk.sizes)
    ]
    return _tile(tuple((0, size) for size in row.shape), boxes)


def _tile(whole: Box, boxes: Sequence[Box]) -> bool:
    """Return whether boxes that result from cuts straight across `whole` fill it exactly."""
    if len(boxes) <= 1:
        return list(boxes) == [whole]
    for axis in range(len(whole)):
        slabs = list(_slabs(axis, boxes))
        if len(slabs) > 1:
            starts = [whole[axis][0], *(min(box[axis][0] for box in slab) for slab in slabs[1:])]
            spans = zip(starts, [*starts[1:], whole[axis][1]], strict=True)
            return all(
                _tile((*whole[:axis], span, *whole[axis + 1 :]), slab)
                for span, slab in zip(spans, slabs, strict=True)
            )
    return False


def _slabs(axis: int, boxes: Sequence[Box]) -> Iterator[list[Box]]:
    """Yield groups of boxes such that a cut across `axis` between two groups crosses no box."""
    slab: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box[axis]):
        if slab and box[axis][0] >= end:
            yield slab
            slab = []
        slab.append(box)
        end = max(end, box[axis][1])
    yield slab


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
