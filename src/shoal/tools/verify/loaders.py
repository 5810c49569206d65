"""The samples of a DataLoader, by their indices in the innermost dataset, and of a shoal.Loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, Subset

from shoal.data.feed import PositionedSource
from shoal.data.iterable_dataset import StreamSource
from shoal.data.loader import Loader
from shoal.data.orders import WeightedSampling
from shoal.data.sampler import LocalBatch
from shoal.data.shards import ShardSource
from shoal.tools.verify.observations import ACCELERATE, LoaderKey, LoaderRecord
from shoal.util.errors import DataError

Indices: TypeAlias = NDArray[np.integer[Any]]


def innermost_dataset(dataset: Any) -> Any:
    """Return the dataset of a Subset, of nested ones too."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def subset_indices(dataset: Any) -> Indices | None:
    """Return the indices of a Subset in the innermost dataset, None for other datasets."""
    if not isinstance(dataset, Subset):
        return None
    return _inside(_integers(dataset.indices), subset_indices(dataset.dataset))


def innermost_index(index: Any, subset: Indices | None) -> Any:
    """Return an index of a sampler as a plain value, in the innermost dataset if it is an integer."""
    if not hasattr(index, "__index__"):
        return repr(index)
    return int(index if subset is None else subset[index])


@dataclass(kw_only=True)
class LoaderPass:
    """A pass over a DataLoader: the batches that it has delivered, of how many if that is known.

    `subset` has the indices of a Subset in its innermost dataset.
    """

    loader: LoaderKey
    epoch: int
    subset: Indices | None
    batches: int | None = None
    delivered: int = 0


class DatasetNumbers:
    """Numbers of datasets, which are the same for the same object only."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], int]] = {}
        self._next = count()

    def of(self, dataset: Any) -> int:
        """Return the number of a dataset."""
        known, number = self._known.get(id(dataset), (lambda: None, 0))
        if known() is dataset:
            return number
        number = next(self._next)
        try:
            self._known[id(dataset)] = (ref(dataset), number)
        except TypeError:  # no weak reference: a list stays in memory, so that no other gets its id
            self._known[id(dataset)] = (lambda: dataset, number)
        return number


def describe_torch_loader(
    loader: Any, *, key: LoaderKey, line: str, datasets: DatasetNumbers
) -> LoaderRecord:
    """Return the record of a DataLoader."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    # A SubsetRandomSampler reads some samples, also if Fabric wraps it as a DistributedSampler.
    read = getattr(sampler, "indices", getattr(sampler, "dataset", loader.dataset))
    subset = subset_indices(loader.dataset)
    samples = _inside(_integers(read), subset) if hasattr(sampler, "indices") else subset
    generator = getattr(sampler, "generator", None)
    return LoaderRecord(
        loader=key,
        size=len(read) if hasattr(read, "__len__") else None,
        sampler=ACCELERATE if type(batches).__name__ == ACCELERATE else type(sampler).__name__,
        shuffle=type(sampler).__name__ == "RandomSampler" or bool(getattr(sampler, "shuffle", False)),
        drop_last=bool(loader.drop_last or getattr(sampler, "drop_last", False)),
        line=line,
        replacement=bool(getattr(sampler, "replacement", False)),
        samples=None if samples is None else tuple(samples.tolist()),
        dataset=datasets.of(innermost_dataset(loader.dataset)),
        draws_observed=not isinstance(loader.dataset, IterableDataset),
        seed=None if generator is None else generator.initial_seed(),
    )


def _integers(values: Any) -> Indices | None:
    """Return a sequence of integers as an array, None for other values."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        return None
    return found.astype(np.int64)


def _inside(indices: Indices | None, outer: Indices | None) -> Indices | None:
    return indices if indices is None or outer is None else outer[indices]


Source: TypeAlias = PositionedSource | StreamSource


class ConsumedSamples(NamedTuple):
    """The samples of a local batch: their epoch, their indices, and whether the epoch ends."""

    epoch: int
    indices: tuple[int, ...]
    ends: bool


def describe_loader(source: Source, *, key: LoaderKey, line: str) -> LoaderRecord:
    """Return the record of a Loader. An iterable dataset has no size before an epoch ends."""
    if isinstance(source, StreamSource):
        return LoaderRecord(
            loader=key,
            size=source.epoch_size,
            sampler="IterableDataset",
            shuffle=False,
            drop_last=source.cutting.drop_last,
            line=line,
            part=source.cutting.rank,
            micro_batches=source.cutting.micro_batches,
            draws_observed=source.cutting.seed_transforms,
        )
    sampler = source.sampler
    return LoaderRecord(
        loader=key,
        size=len(sampler.order),
        sampler=type(sampler.order).__name__,
        shuffle=source.state()["shuffle"],
        drop_last=sampler.drop_last,
        line=line,
        replacement=isinstance(sampler.order, WeightedSampling),
        part=sampler.rank,
        micro_batches=sampler.micro_batches,
        draws_observed=not isinstance(source.source, ShardSource) or source.source.seed_transforms,
    )


def consumed_samples(source: Source, batch: LocalBatch) -> ConsumedSamples:
    """Return the samples of a local batch that the source has moved past, without padding samples.

    A sample of an iterable dataset has its number in the epoch for an index.
    """
    if isinstance(source, StreamSource):
        after = source.epoch_size if batch.ends and source.epoch_size else source.state()["offset"]
        epoch, begin, ends = source.epoch - batch.ends, after - batch.size, batch.ends
    else:
        epoch, offset = divmod(batch.first, source.sampler.epoch_size)
        begin, ends = 0, offset + batch.size == source.sampler.epoch_size
    indices: list[int] = []
    for cell, rows in zip(batch.cells, batch.rows()[:: batch.partners + 1], strict=True):
        if cell.weight:
            indices += (begin + batch.indices[rows]).tolist()
    return ConsumedSamples(epoch, tuple(indices), ends)


def multiply_micro_batches(factor: int) -> None:
    """Give each Loader `factor` times as many micro-batches, unless its batches are too small."""
    kind: Any = Loader
    original = kind.__init__

    @wraps(original)
    def built(self: Any, *arguments: Any, micro_batches: int = 1, **named: Any) -> None:
        try:
            original(self, *arguments, micro_batches=factor * micro_batches, **named)
        except DataError:
            original(self, *arguments, micro_batches=micro_batches, **named)

    kind.__init__ = built
