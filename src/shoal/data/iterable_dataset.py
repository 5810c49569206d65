"""Datasets that can only be iterated: every rank reads them from the beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from shoal._torch.dataloader import leave_worker
from shoal.data.feed import Feed, Fetch
from shoal.data.map_dataset import (
    GLOBAL_STREAM,
    Collate,
    collated,
    global_generators_kept,
    set_global_generators,
)
from shoal.data.noise import Noise
from shoal.data.sampler import LocalBatch, cut, fetched, positions_of
from shoal.util.errors import DataError


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The options with which a stream of samples is split into global batches."""

    batch_size: int
    ranks: int
    rank: int
    micro_batches: int
    drop_last: bool
    collate: Collate
    seed: int
    seed_transforms: bool
    unit: int | None = None
    partners: int = 0


class StreamSource(Feed):
    """The source of an IterableDataset: each rank reads all of it and keeps its local batches.

    Each rank finds the end by itself, so ranks do not communicate, and the number of ranks does not
    change the batches. The state is a number of samples in an epoch: on resume, the samples before it
    are read and dropped. The dataset's own `state_dict` is not used, because that of a shuffled Hugging
    Face dataset loses the samples in its buffer.
    """

    def __init__(self, dataset: Any, cutting: BatchSplit) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise DataError(
                given="Loader(split_dataset_by_node(dataset, …), …)",
                found="it gives each rank a part, and the Loader would split that part again",
                fix="pass the complete dataset on every rank: leave split_dataset_by_node out",
            )
        self.seed = cutting.seed
        self._dataset = dataset
        self.cutting = cutting
        self._epoch = 0
        self._offset = 0
        self._size: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    @property
    def epoch_size(self) -> int | None:
        """Samples in the last epoch that ended; None before."""
        return self._size

    def shares(self, epochs: int, fetch: Fetch) -> Iterator[tuple[LocalBatch, list[Any]]]:
        """Yield the local batches from the position to the end of epoch `epochs`, with their values."""
        if self._epoch >= epochs:
            return iter(())
        if self._offset:
            fetch.world.print(
                f"to resume, ranks read and drop {self._offset:,} samples of the IterableDataset; "
                "a shoal.ShardedDataset seeks instead"
            )
        reading = StreamReader(
            self._dataset, self.cutting, self.position, self._epoch, self._offset, epochs
        )
        # Several workers would each read everything, or a part that they choose themselves.
        fetch = replace(fetch, num_workers=min(1, fetch.num_workers))
        items = fetch.items(reading, None, self.position)
        return ((share._replace(load=seconds), values) for (share, values), seconds in items)

    def cut_at(self, unit: int | None) -> None:
        """See Feed."""
        self.cutting = replace(self.cutting, unit=unit)

    def consumed(self, share: LocalBatch) -> None:
        """Move the position past a local batch."""
        self.position = share.first + share.size
        self._offset += share.size
        if share.ends:
            self._epoch, self._offset, self._size = self._epoch + 1, 0, self._offset

    def state(self) -> dict[str, Any]:
        """Return the position, and the facts about the data and its order that it depends on."""
        return {
            "position": self.position,
            "kind": "iterated",
            "seed": self.seed,
            "epoch": self._epoch,
            "offset": self._offset,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        self.position = state["position"]
        self._epoch = state["epoch"]
        self._offset = state["offset"]


class StreamReader(IterableDataset[tuple[LocalBatch, list[Any]]]):
    """The local batches of one rank from a place in the stream on; a worker iterates over it."""

    def __init__(
        self, dataset: Any, cutting: BatchSplit, position: int, epoch: int, offset: int, until: int
    ) -> None:
        self._dataset = dataset
        self._cutting = cutting
        self._place = (position, epoch, offset)
        self._until = until

    def __iter__(self) -> Iterator[tuple[LocalBatch, list[Any]]]:
        # Datasets must not see the worker: they would split or reseed themselves by its number.
        leave_worker()
        first, begun, offset = self._place
        size, drop = self._cutting.batch_size, self._cutting.drop_last
        for epoch in range(begun, self._until):
            samples = self._begun(epoch, first - offset, offset)
            held = self._read(samples, first, size)
            if not held or (drop and len(held) < size and not offset):
                raise self._nothing(epoch, len(held))
            ends = False
            while not ends:
                # A batch is the last of its epoch if no samples follow it.
                following = self._read(samples, first + len(held), size)
                ends = len(following) < (size if drop else 1)
                yield self._share(held, first, ends=ends)
                first += len(held)
                held = following
            offset = 0

    def _begun(self, epoch: int, first: int, offset: int) -> Iterator[Any]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        samples: Iterator[Any] = iter(self._dataset)
        found = sum(len(self._read(samples, first + number, 1)) for number in range(offset))
        if found < offset:
            raise DataError(
                given=f"Loader({type(self._dataset).__name__}, …) after {offset:,} samples of epoch "
                f"{epoch}",
                found=f"the dataset now ends after {found:,}",
                fix="train on the same data, or start a new run in another run directory",
            )
        return samples

    def _read(self, samples: Iterator[Any], first: int, count: int) -> list[Any]:
        if not self._cutting.seed_transforms:
            return list(itertools.islice(samples, count))
        found: list[Any] = []
        with global_generators_kept():
            for generator in Noise(self._cutting.seed, first, count, stream=GLOBAL_STREAM).generators():
                set_global_generators(generator)
                found += itertools.islice(samples, 1)
        return found

    def _share(self, samples: list[Any], first: int, *, ends: bool) -> tuple[LocalBatch, list[Any]]:
        how = self._cutting
        cells = cut(
            len(samples),
            ranks=how.ranks,
            rank=how.rank,
            micro_batches=how.micro_batches,
            unit=how.unit,
        )
        indices = positions_of(fetched(cells, len(samples), how.partners))
        share = LocalBatch(first, len(samples), cells, indices, ends, partners=how.partners)
        return share, collated([samples[index] for index in indices], share, how.collate)

    def _nothing(self, epoch: int, found: int) -> DataError:
        return DataError(
            given=f"Loader({type(self._dataset).__name__}, …)",
            found=f"epoch {epoch} has {found} samples, which is not enough for a batch",
            fix="let its __iter__ start from the beginning each time: `def __iter__(self): yield from "
            "…`, not `return self`; with drop_last, use a smaller batch_size",
        )
