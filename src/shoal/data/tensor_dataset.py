"""The sources of samples: tensors and arrays, and the choice of a source for other datasets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from shoal.data.map_dataset import (
    ArrayDataset,
    BlockDataset,
    Collate,
    MapStyleDataset,
    digest,
    values_of,
)
from shoal.data.sampler import LocalBatch
from shoal.data.shards import ShardedDataset, ShardSource
from shoal.util.errors import DataError

BLOCK_BATCHES = 64
BLOCK_BYTES = 4 * 2**20


class Arrays(BlockDataset):
    """Tensors in memory: one gather per tensor and block; micro-batches are parts of the result.

    Each part has its own version counter, unlike a view: a model may change one micro-batch in
    place while autograd keeps another for its backward.
    """

    def __init__(self, structure: Any, tensors: dict[Any, Tensor], share: int) -> None:
        self._structure = structure
        self._tensors = tensors
        self.size = len(next(iter(tensors.values())))
        others = [t.device for t in tensors.values() if t.device.type != "cpu"]
        self.device = others[0] if others else torch.device("cpu")
        row = sum(t[:1].numel() * t.element_size() for t in tensors.values())
        self.block = max(1, min(BLOCK_BATCHES, BLOCK_BYTES // max(1, row * share)))

    def __getitem__(self, shares: list[LocalBatch]) -> list[list[Any]]:
        parts = [share.indices[rows] for share in shares for rows in share.rows()]
        indices, lengths = torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]
        pieces = {
            key: tensor.index_select(0, indices.to(tensor.device)).unsafe_split_with_sizes(lengths)
            for key, tensor in self._tensors.items()
        }
        values = [self._value(piece) for piece in zip(*pieces.values(), strict=True)]
        count = len(values) // len(shares)
        return [
            share.together(values[number * count : (number + 1) * count])
            for number, share in enumerate(shares)
        ]

    def checksum(self) -> str:
        """Return a checksum of the first, the middle and the last sample."""
        return digest(self._tensors.values())

    def _value(self, pieces: tuple[Tensor, ...]) -> Any:
        if self._structure is tuple:
            return pieces
        if self._structure is dict:
            return dict(zip(self._tensors, pieces, strict=True))
        return pieces[0] if self._structure is None else self._structure(pieces)


def source(
    dataset: Any, collate: Collate | None, share: int, *, seed: int = 0, seed_transforms: bool = False
) -> BlockDataset:
    """Return the source for `dataset`; `share` is the number of samples in a full local batch.

    Raises DataError for datasets without samples, without a length, or of uneven tensors.
    """
    arrays = _arrays(dataset)
    if arrays is not None:
        structure, tensors = arrays
        lengths = {key: len(tensor) for key, tensor in tensors.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(
                given="Loader with several tensors",
                found=f"they hold different numbers of samples: {lengths}",
                fix="use tensors with the same first dimension: print([len(t) for t in tensors])",
            )
    found: BlockDataset
    if isinstance(dataset, ShardedDataset):
        found = ShardSource(dataset, collate or default_collate, seed, seed_transforms=seed_transforms)
    elif arrays is not None and seed_transforms:
        raise DataError(
            given="Loader(tensors, seed_transforms=True)",
            found="tensors draw no random numbers when a sample is taken",
            fix="use a map-style dataset whose __getitem__ augments the samples, or draw noise in the "
            "task: batch.noise",
        )
    elif arrays is not None and collate is None:
        found = Arrays(structure, tensors, share)
    elif isinstance(dataset, tuple | Mapping) and arrays is not None:
        found = MapStyleDataset(ArrayDataset(structure, dataset), collate or default_collate)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        found = MapStyleDataset(
            dataset, collate or default_collate, seed, seed_transforms=seed_transforms
        )
    else:
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found="it lacks __len__ or __getitem__, which random access needs",
            fix="pass a map-style dataset, tensors or NumPy arrays, for example list(samples); "
            "instead of a DataLoader, pass its .dataset",
        )
    if found.size == 0:
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found="a dataset without samples",
            fix="print(len(dataset)) before it, and check the path or the filter of the dataset",
        )
    return found


def _arrays(dataset: Any) -> tuple[Any, dict[Any, Tensor]] | None:
    """Return (structure, tensors) of a dataset that has only tensors or arrays, else None."""
    if isinstance(dataset, TensorDataset):
        return tuple, dict(enumerate(dataset.tensors))
    if isinstance(dataset, Tensor | np.ndarray):
        return None, {0: _tensor(dataset)}
    if not isinstance(dataset, tuple | Mapping) or not dataset:
        return None
    others = [value for value in values_of(dataset) if not isinstance(value, Tensor | np.ndarray)]
    if others and (isinstance(dataset, Mapping) or len(others) < len(dataset)):
        raise DataError(
            given=f"Loader({type(dataset).__name__}, …)",
            found=f"it holds a {type(others[0]).__name__}, which is neither a tensor nor an array",
            fix="pass only tensors or arrays, as in (torch.tensor(images), torch.tensor(labels)); "
            "instead of a DatasetDict, pass one split: dataset['train']",
        )
    if others:
        return None
    if isinstance(dataset, Mapping):
        return dict, {key: _tensor(value) for key, value in dataset.items()}
    structure = getattr(dataset, "_make", tuple)  # of a namedtuple
    return structure, {number: _tensor(value) for number, value in enumerate(dataset)}


def _tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    given = value if isinstance(value, Tensor) else np.ascontiguousarray(value)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*not writable")  # a memmap, which is only read
            tensor = torch.as_tensor(given)
    except TypeError:
        raise DataError(
            given=f"Loader with an array of dtype {value.dtype}",
            found="torch has no such dtype",
            fix="use array.astype('float32') for numbers, np.unique(array, return_inverse=True)[1] "
            "for names",
        ) from None
    if value.ndim == 0:
        raise DataError(
            given="Loader with a tensor without dimensions",
            found="the first dimension counts samples",
            fix="pass a tensor of shape (samples, …): tensor[None] is one sample",
        )
    return tensor
