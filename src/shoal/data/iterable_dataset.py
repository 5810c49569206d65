"""Datasets that can only be iterated: read from their beginning, by every rank alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
from shoal.data.sampler import Share, cut
from shoal.util.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How global batches are cut out of what flows by."""

    batch_size: int
    ranks: int
    rank: int
    micro_batches: int
    drop_last: bool
    collate: Collate
    seed: int
    seed_transforms: bool


class Flow(Feed):
    """An IterableDataset: each rank reads all of it, keeps its share, and sees by itself where it ends.

    So no rank asks another, and the number of ranks changes nothing. Its place is a number of samples
    in an epoch: to go on there, those before are read and dropped. A dataset's own `state_dict` is not
    used: that of a shuffled Hugging Face dataset loses what its buffer holds.
    """

    def __init__(self, dataset: Any, cutting: Cutting) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise DataError(
                given="Loader(split_dataset_by_node(dataset, …), …)",
                found="it gives each rank a part, and the Loader would cut that part again",
                fix="the whole dataset on every rank: leave split_dataset_by_node out",
            )
        self.seed = cutting.seed
        self._dataset = dataset
        self._cutting = cutting
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

    def shares(self, epochs: int, fetch: Fetch) -> Iterator[tuple[Share, list[Any]]]:
        """The shares from where it stands to the end of epoch `epochs`, with their values."""
        if self._epoch >= epochs:
            return iter(())
        if self._offset:
            fetch.world.print(
                f"reading and dropping {self._offset:,} samples of an IterableDataset to go on after "
                "them; a shoal.ShardedDataset of shards seeks"
            )
        reading = Reading(
            self._dataset, self._cutting, self.position, self._epoch, self._offset, epochs
        )
        # Several workers would each read everything, or a part of their own choice.
        fetch = replace(fetch, num_workers=min(1, fetch.num_workers))
        items = fetch.items(reading, None, self.position)
        return ((share._replace(load=seconds), values) for (share, values), seconds in items)

    def consumed(self, share: Share) -> None:
        """Go on after a share."""
        self.position = share.first + share.size
        self._offset += share.size
        if share.ends:
            self._epoch, self._offset, self._size = self._epoch + 1, 0, self._offset

    def state(self) -> dict[str, Any]:
        """Where it stands, and what that would mean nothing without."""
        return {
            "position": self.position,
            "kind": "iterated",
            "seed": self.seed,
            "epoch": self._epoch,
            "offset": self._offset,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that has been checked."""
        self.position = state["position"]
        self._epoch = state["epoch"]
        self._offset = state["offset"]


class Reading(IterableDataset[tuple[Share, list[Any]]]):
    """The shares of one rank from a place in the flow on; what a worker iterates."""

    def __init__(
        self, dataset: Any, cutting: Cutting, position: int, epoch: int, offset: int, until: int
    ) -> None:
        self._dataset = dataset
        self._cutting = cutting
        self._place = (position, epoch, offset)
        self._until = until

    def __iter__(self) -> Iterator[tuple[Share, list[Any]]]:
        # A worker that reads for nobody but itself: datasets would else divide or reseed by its number.
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
                # Only what follows says whether a batch is the last of its epoch.
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
                given=f"Loader({type(self._dataset).__name__}, …) that had given {offset:,} samples of "
                f"epoch {epoch}",
                found=f"it ends after {found:,} now",
                fix="train on the same data, or start afresh in another run directory",
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

    def _share(self, samples: list[Any], first: int, *, ends: bool) -> tuple[Share, list[Any]]:
        how = self._cutting
        cells = cut(len(samples), ranks=how.ranks, rank=how.rank, micro_batches=how.micro_batches)
        indices = np.concatenate([np.arange(cell.start, cell.stop) for cell in cells])
        share = Share(first, len(samples), cells, indices, ends)
        return share, collated([samples[index] for index in indices], share, how.collate)

    def _nothing(self, epoch: int, found: int) -> DataError:
        return DataError(
            given=f"Loader({type(self._dataset).__name__}, …)",
            found=f"epoch {epoch} gives {found} samples, and so no batch",
            fix="its __iter__ must begin anew each time: `def __iter__(self): yield from …`, not "
            "`return self`; or a smaller batch_size with drop_last",
        )
