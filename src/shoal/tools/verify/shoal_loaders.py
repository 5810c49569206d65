"""The samples of a shoal.Loader, from its source."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from shoal.data.feed import PositionedSource
from shoal.data.iterable_dataset import StreamSource
from shoal.data.loader import Loader
from shoal.data.orders import WeightedSampling
from shoal.data.sampler import LocalBatch
from shoal.data.shards import ShardSource
from shoal.tools.verify.observations import LoaderKey, LoaderRecord
from shoal.tools.verify.patches import call_around
from shoal.util.errors import DataError

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
    taken = 0
    for cell in batch.cells:
        count = cell.stop - cell.start
        if cell.weight:
            indices += (begin + batch.indices[taken : taken + count]).tolist()
        taken += count
    return ConsumedSamples(epoch, tuple(indices), ends)


def multiply_micro_batches(factor: int) -> None:
    """Give each Loader `factor` times as many micro-batches, unless its batches are too small."""

    def built(begin: Any, *arguments: Any, micro_batches: int = 1, **named: Any) -> None:
        try:
            begin(*arguments, micro_batches=factor * micro_batches, **named)
        except DataError:
            begin(*arguments, micro_batches=micro_batches, **named)

    call_around(Loader, "__init__", built)
