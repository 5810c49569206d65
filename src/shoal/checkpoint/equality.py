"""A check that ranks hold the same state: the compared facts, and the first entry that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.state_tree import path_of
from shoal.strategies.dtensor import is_divided

_SAMPLED = 4096
"""The number of elements of a tensor, evenly spaced, whose order is compared."""
_TOLERANCE = 1e-5
"""Relative: replicas may differ in the last bits of values that each of them computed."""
_TOLERANCE_16 = 1e-2


class EntryFacts(NamedTuple):
    """The compared facts of one entry: its kind, and sums, each with the sum of the magnitudes."""

    kind: str
    numbers: tuple[tuple[float, float], ...] = ()
    tolerance: float = 0.0


def facts(tree: Any, *root: str | int, in_parts: bool = False) -> dict[str, EntryFacts]:
    """Return the compared facts of each entry of a state, by path; outer entries come first.

    If ranks hold the state `in_parts`, the keys of dicts may differ. Sharded tensors are compared by
    shape only. Reads each tensor once, without a copy.
    """
    found = {path_of(*root): _fact(tree, in_parts)} if root else {}
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        items = ()
    for key, value in items:
        found |= facts(value, *root, key, in_parts=in_parts)
    return found


def differing(ranks: Sequence[Mapping[str, EntryFacts]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first path whose fact is not the same on all ranks that have it, and the odd ranks.

    These differ from the first rank that has the entry.
    """
    for path in dict.fromkeys(path for found in ranks for path in found):
        holders = {rank: found[path] for rank, found in enumerate(ranks) if path in found}
        usual = next(iter(holders.values()))
        odd = tuple(rank for rank, fact in holders.items() if not _same(usual, fact))
        if odd:
            return path, odd
    return None


def _fact(value: Any, in_parts: bool) -> EntryFacts:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            return EntryFacts(f"array of {array.dtype}")  # a save raises an error for it
        return _of_array(array)
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, Mapping):
        return EntryFacts("dict" if in_parts else f"dict of {sorted(map(str, value))}")
    if isinstance(value, list | tuple):
        return EntryFacts(f"{len(value)} entries")
    if isinstance(value, float):
        return EntryFacts("float", ((value, abs(value)),), _TOLERANCE)
    plain = value is None or isinstance(value, bool | int | str | bytes)
    return EntryFacts(repr(value) if plain else type(value).__name__)  # a save raises for other types


def _of_array(array: np.ndarray[Any, Any]) -> EntryFacts:
    try:
        return _of_tensor(torch.from_numpy(array.copy()))
    except (TypeError, ValueError):  # another byte order, or longer numbers than torch has
        return EntryFacts(f"array of {array.dtype}")  # a save raises an error for it


def _of_tensor(tensor: Tensor) -> EntryFacts:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if is_divided(tensor):
        return EntryFacts(f"divided {kind}")
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return EntryFacts(kind)
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = flat.reshape(-1)
    if not flat.is_floating_point():
        spaced = _spaced(flat).long()
        sums = torch.stack((flat.sum(dtype=torch.long), (spaced * _weights(spaced)).sum()))
        return EntryFacts(f"{kind} {sums.tolist()}")
    wide = flat if flat.element_size() > 1 else flat.float()  # 8 bits can't be summed
    some = _spaced(wide).double()
    sums = torch.stack(
        (
            wide.sum(dtype=torch.float64),
            torch.linalg.vector_norm(wide, 1, dtype=torch.float64),
            some @ _weights(some),
            some.abs() @ _weights(some),
        )
    )
    whole, size, ordered, size_ordered = sums.tolist()
    tolerance = _TOLERANCE if flat.element_size() > 2 else _TOLERANCE_16
    return EntryFacts(kind, ((whole, size), (ordered, size_ordered)), tolerance)


def _spaced(flat: Tensor) -> Tensor:
    return flat[:: math.ceil(len(flat) / _SAMPLED)]


def _weights(values: Tensor) -> Tensor:
    return torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)


def _same(one: EntryFacts, other: EntryFacts) -> bool:
    if (one.kind, len(one.numbers)) != (other.kind, len(other.numbers)):
        return False
    for (a, size), (b, more) in zip(one.numbers, other.numbers, strict=True):
        equal = a == b or (math.isnan(a) and math.isnan(b))
        if not equal and not abs(a - b) <= one.tolerance * max(size, more) < math.inf:
            return False
    return True
