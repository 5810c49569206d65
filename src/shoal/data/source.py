"""Where samples come from: tensors, arrays and map-style datasets, fetched in blocks of shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from shoal.data.sampler import Share
from shoal.errors import DataError

BLOCK_BATCHES = 64
BLOCK_BYTES = 4 * 2**20

Collate = Callable[[list[Any]], Any]


class Source(Dataset[list[list[Any]]]):
    """A dataset whose item is a block of shares and whose value is their micro-batches.

    This is what torch's DataLoader workers hold: one item per block, fetched at once.
    """

    size: int
    block: int
    """How many global batches make a block."""

    def __len__(self) -> int:
        return self.size


class Arrays(Source):
    """Tensors in memory: one gather per tensor and block, micro-batches are views of it."""

    def __init__(self, structure: Any, tensors: dict[Any, Tensor], share: int) -> None:
        self._structure = structure
        self._tensors = tensors
        self.size = len(next(iter(tensors.values())))
        row = sum(t[:1].numel() * t.element_size() for t in tensors.values())
        self.block = max(1, min(BLOCK_BATCHES, BLOCK_BYTES // max(1, row * share)))

    def __getitem__(self, shares: list[Share]) -> list[list[Any]]:
        indices = torch.from_numpy(np.concatenate([share.indices for share in shares]))
        lengths = [cell.stop - cell.start for share in shares for cell in share.cells]
        pieces = {
            key: tensor.index_select(0, indices).split(lengths) for key, tensor in self._tensors.items()
        }
        count = len(shares[0].cells)
        values = [self._value(piece) for piece in zip(*pieces.values(), strict=True)]
        return [values[start : start + count] for start in range(0, len(values), count)]

    def _value(self, pieces: tuple[Tensor, ...]) -> Any:
        if self._structure is tuple:
            return pieces
        if self._structure is dict:
            return dict(zip(self._tensors, pieces, strict=True))
        return pieces[0] if self._structure is None else self._structure(pieces)


class Mapped(Source):
    """A map-style dataset: one `__getitems__` or many `__getitem__`, then the collate function."""

    block = 1

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._many = getattr(dataset, "__getitems__", None)
        self.size = len(dataset)

    def __getitem__(self, shares: list[Share]) -> list[list[Any]]:
        return [self._share(share) for share in shares]

    def _share(self, share: Share) -> list[Any]:
        indices = share.indices.tolist()
        samples = self._many(indices) if self._many else [self._dataset[index] for index in indices]
        values, taken = [], 0
        for cell in share.cells:
            count = cell.stop - cell.start
            values.append(self._collate(samples[taken : taken + count]))
            taken += count
        return values


class Rows(Dataset[Any]):
    """A tuple or mapping of arrays as samples, for a collate function of the user's own."""

    def __init__(self, structure: Any, columns: Any) -> None:
        self._structure = structure
        self._columns = columns

    def __len__(self) -> int:
        return min(len(column) for column in _values(self._columns))

    def __getitem__(self, index: int) -> Any:
        rows = [column[index] for column in _values(self._columns)]
        if self._structure is dict:
            return dict(zip(self._columns, rows, strict=True))
        return self._structure(rows)


def source(dataset: Any, collate: Collate | None, share: int) -> Source:
    """What serves `dataset`; `share` is the samples a rank takes of a full batch.

    Raises DataError for datasets without samples, without a length, or of uneven tensors.
    """
    if isinstance(dataset, IterableDataset):
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …), an IterableDataset",
            found="it has no sample at a position, which exact resume rests on",
            fix="a map-style dataset with __len__ and __getitem__; streams come with a later version",
        )
    arrays = _arrays(dataset)
    if arrays is not None:
        structure, tensors = arrays
        lengths = {key: len(tensor) for key, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(
                given="Loader with several tensors",
                found=f"they hold different numbers of samples: {lengths}",
                fix="give tensors with the same first dimension",
            )
    if arrays is not None and collate is None:
        found: Source = Arrays(structure, tensors, share)
    elif isinstance(dataset, tuple | Mapping) and arrays is not None:
        found = Mapped(Rows(structure, dataset), collate or default_collate)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        found = Mapped(dataset, collate or default_collate)
    else:
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found="it has not both __len__ and __getitem__",
            fix="a map-style dataset, tensors, or NumPy arrays",
        )
    if found.size == 0:
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found="a dataset without a sample",
            fix="check the path or the filter that it was made from",
        )
    return found


def _arrays(dataset: Any) -> tuple[Any, dict[Any, Tensor]] | None:
    """(structure, tensors) of a dataset that is nothing but tensors or arrays, else None."""
    if isinstance(dataset, TensorDataset):
        return tuple, dict(enumerate(dataset.tensors))
    if isinstance(dataset, Tensor | np.ndarray):
        return None, {0: _tensor(dataset)}
    if not isinstance(dataset, tuple | Mapping) or not dataset:
        return None
    others = [value for value in _values(dataset) if not isinstance(value, Tensor | np.ndarray)]
    if others and (isinstance(dataset, Mapping) or len(others) < len(dataset)):
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found=f"it holds a {type(others[0]).__name__}, which is neither a tensor nor an array",
            fix="tensors or arrays only, as in (torch.tensor(images), torch.tensor(labels)); one "
            "split of a DatasetDict",
        )
    if others:
        return None
    if isinstance(dataset, Mapping):
        return dict, {key: _tensor(value) for key, value in dataset.items()}
    structure = getattr(dataset, "_make", tuple)  # of a namedtuple
    return structure, {number: _tensor(value) for number, value in enumerate(dataset)}


def _values(columns: tuple[Any, ...] | Mapping[Any, Any]) -> Sequence[Any]:
    return list(columns.values()) if isinstance(columns, Mapping) else columns


def _tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    if tensor.dim() == 0:
        raise DataError(
            given="Loader with a tensor without dimensions",
            found="the first dimension counts samples",
            fix="give a tensor of shape (samples, …)",
        )
    return tensor
