"""Comparison of two checkpoints: names, forms and values of tensors, and all plain state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.inspect.manifest import CheckpointManifest, Reference, leaves
from shoal.checkpoint.inspect.tensor_reader import TensorFiles, blocks
from shoal.checkpoint.tensor_index import TensorEntry

BLOCK = 1 << 25
"""Bytes of a tensor that are compared at a time; the comparison takes about ten times as many."""


@dataclass(frozen=True, kw_only=True)
class ChangedTensor:
    """A tensor of the same dtype and shape with other values.

    `elements` of `of` differ, by at most `absolute`; `relative` is that divided by the largest
    magnitude in the first checkpoint. Both are NaN if one value is NaN and the other is not.
    """

    name: str
    elements: int
    of: int
    absolute: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between two checkpoints.

    `plain` and `info` hold a path with both values, None for a missing one. `info` has the
    circumstances of a save, which are not part of the state.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reformed: tuple[tuple[str, TensorEntry, TensorEntry], ...]
    changed: tuple[ChangedTensor, ...]
    plain: tuple[tuple[str, str | None, str | None], ...]
    info: tuple[tuple[str, str | None, str | None], ...]
    tensors: int

    @property
    def same(self) -> bool:
        """True if a run would continue in the same way from both."""
        parts = (self.only_first, self.only_second, self.reformed, self.changed, self.plain)
        return not any(parts)


def compare(first: CheckpointManifest, second: CheckpointManifest) -> Comparison:
    """Compare the contents of two checkpoints, block by block, so that memory stays small."""
    a, b = first.tensors, second.tensors
    common = [name for name in a if name in b]
    same = [name for name in common if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)]
    with TensorFiles(first) as left, TensorFiles(second) as right:
        found = [_changed(name, a[name], left, right) for name in same]
    return Comparison(
        only_first=tuple(name for name in a if name not in b),
        only_second=tuple(name for name in b if name not in a),
        reformed=tuple((name, a[name], b[name]) for name in common if name not in set(same)),
        changed=tuple(one for one in found if one is not None),
        plain=_differing(_plain(first), _plain(second)),
        info=_differing(first.info, second.info),
        tensors=len(a.keys() | b.keys()),
    )


def _differing(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[tuple[str, str | None, str | None], ...]:
    here, there = dict(_texts(first)), dict(_texts(second))
    paths = {**here, **there}
    differ = [path for path in paths if here.get(path) != there.get(path)]
    return tuple((path, here.get(path), there.get(path)) for path in differ)


def _plain(contents: CheckpointManifest) -> dict[str, Any]:
    return {
        "step": contents.manifest.step,
        "ranks": contents.manifest.world_size,
        "state": contents.state,
        "rank": dict(enumerate(contents.rank_state)),
    }


def _texts(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield all values that are not tensors, with their paths, as strings that differ if they do."""
    for at, value in leaves(tree):
        if not isinstance(value, Reference):
            yield "/".join(at), repr(value)


def _changed(
    name: str, row: TensorEntry, left: TensorFiles, right: TensorFiles
) -> ChangedTensor | None:
    differ, most = 0, 0.0
    for spans in blocks(row, BLOCK):
        count, by = _difference(left.part(name, spans), right.part(name, spans))
        differ, most = differ + count, _larger(most, by)
    if not differ:
        return None
    largest = 0.0
    for spans in blocks(row, BLOCK):
        largest = _larger(largest, float(_wide(left.part(name, spans)).abs().max()))
    return ChangedTensor(
        name=name,
        elements=differ,
        of=math.prod(row.shape),
        absolute=most,
        relative=most / largest if largest else math.inf if most else 0.0,
    )


def _difference(one: Tensor, other: Tensor) -> tuple[int, float]:
    """Return the number of elements that differ, and the largest difference.

    Zeros of different signs differ. NaNs are equal, independent of their bits.
    """
    if torch.equal(_bits(one), _bits(other)):
        return 0, 0.0
    a, b = _wide(one), _wide(other)
    unequal = (_bits(one) != _bits(other)).reshape(one.numel(), -1).any(dim=1)
    unequal &= ~(a.isnan() & b.isnan())
    by = (a - b).abs()[unequal]
    return int(unequal.sum()), float(by.max()) if by.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).reshape(-1)


def _larger(one: float, other: float) -> float:
    return other if other > one or math.isnan(other) else one
