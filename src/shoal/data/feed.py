"""The sources of a Loader: the local batches from any position on, and that position."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal._torch.dataloader import end_workers, worker_processes
from shoal.data.map_dataset import BlockDataset
from shoal.data.orders import CheckedOrder
from shoal.data.sampler import LocalBatch, PositionRange, RankSampler
from shoal.data.shards import Lanes
from shoal.data.worker_failure import LoaderWorkers, TimedItem, WorkerError, end_if_unsent
from shoal.distributed.virtual_ranks import VirtualRanks
from shoal.distributed.world import World
from shoal.util.clock import CLOCK
from shoal.util.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """The options with which torch's DataLoader fetches."""

    world: World
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool

    def items(self, dataset: Dataset[Any], sampler: Any, position: int) -> Iterator[TimedItem]:
        """Yield the items of `dataset` at the indices of `sampler`; without one, all its items."""
        # By position, so that the random numbers of workers do not repeat in a later loop or after a
        # resume.
        generator = torch.Generator().manual_seed(
            self.world.seed_for(f"workers from sample {position}")
        )
        loader: DataLoader[Any] = DataLoader(
            timed(dataset, in_worker=self.num_workers > 0),
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            pin_memory=self.pin_memory,
            generator=generator,
            worker_init_fn=_begin_worker,
        )
        workers = LoaderWorkers(rank=self.world.rank, count=self.num_workers)
        with workers.explained():
            items = iter(loader)
            if self.num_workers:
                workers.processes.extend(worker_processes(items))
                workers.watch()
            try:
                yield from items
            finally:
                with suppress(RuntimeError, DataError):  # of the same dead worker, once more
                    end_workers(items)


class Feed(ABC):
    """The local batches of one kind of dataset. `position` counts samples since the start."""

    seed: int
    position: int = 0
    proportions: tuple[int, ...] | None = None
    """The proportions in which batches are split over ranks; None if each gets equally many."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""

    @property
    @abstractmethod
    def epoch_size(self) -> int | None:
        """Samples in an epoch; None while the number is not known."""

    @abstractmethod
    def shares(self, epochs: int, fetch: Fetch) -> Iterator[tuple[LocalBatch, list[Any]]]:
        """Yield the local batches from the position to the end of epoch `epochs`, with their values."""

    @abstractmethod
    def cut_at(self, unit: int | None) -> None:
        """Cut micro-batches at multiples of `unit` samples from now on; see `piece` in groups.py."""

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Fetch micro-batches of `sizes` samples each again, from position `first` on.

        Starts earlier if the epoch would end in them. Returns None if samples can't be fetched again.
        """
        return None

    def split_by(self, proportions: tuple[int, ...] | None) -> None:
        """Give ranks samples in these proportions from now on; None is equally many."""
        raise NotImplementedError(type(self).__name__)

    def held(self) -> dict[str, str]:
        """Return digests of the arrays that the user's dataset holds, by their names."""
        return {}

    @abstractmethod
    def consumed(self, share: LocalBatch) -> None:
        """Move the position past a local batch."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the position, and the facts about the data and its order that it depends on."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""


class PositionedSource(Feed):
    """A source with a sample at every position, so that the position is its only state."""

    def __init__(self, source: BlockDataset, sampler: RankSampler, *, shuffle: bool) -> None:
        self.seed = sampler.seed
        self.source = source
        self.sampler = sampler
        self._shuffle = shuffle

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.position // self.sampler.epoch_size

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return self.sampler.epoch_size

    def shares(self, epochs: int, fetch: Fetch) -> Iterator[tuple[LocalBatch, list[Any]]]:
        """Yield the local batches from the position to the end of epoch `epochs`, with their values."""
        until = epochs * self.sampler.epoch_size
        blocks = _Blocks(self.sampler, self.position, until, self.source.block)
        for values, seconds in fetch.items(self.source, blocks, self.position):
            shares = blocks.sent.pop(0)
            for share, value in zip(shares, values, strict=True):
                yield share._replace(load=seconds / len(shares)), value

    def cut_at(self, unit: int | None) -> None:
        """See Feed."""
        self.sampler = replace(self.sampler, unit=unit)

    def split_by(self, proportions: tuple[int, ...] | None) -> None:
        """See Feed."""
        self.proportions = proportions
        self.sampler = replace(self.sampler, proportions=proportions)

    def held(self) -> dict[str, str]:
        """See Feed."""
        return self.source.held()

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Fetch micro-batches of `sizes` samples each again, from position `first` on or before it."""
        length = self.sampler.epoch_size
        epoch, offset = divmod(first, length)
        offset = min(offset, length - sum(sizes))
        if offset < 0:
            return None
        stops = list(itertools.accumulate(sizes))
        cells = tuple(
            PositionRange(stop - size, stop, 1.0) for size, stop in zip(sizes, stops, strict=True)
        )
        positions = np.arange(offset, offset + stops[-1])
        indices = self.sampler.order.take(positions, seed=self.seed, epoch=epoch)
        share = LocalBatch(
            epoch * length + offset, stops[-1], cells, indices, partners=self.sampler.partners
        )
        return self.source[[share]][0]

    def fetch(self, first: int, size: int, virtual: VirtualRanks) -> tuple[LocalBatch, list[Any]]:
        """Fetch the local batch of other virtual ranks in the batch from position `first` on."""
        share = replace(self.sampler, virtual=virtual).local_batch(first, size)
        return share, self.source[[share]][0]

    def consumed(self, share: LocalBatch) -> None:
        """Move the position past a local batch."""
        self.position = share.first + share.size

    def state(self) -> dict[str, Any]:
        """Return the position, and the facts about the data and its order that it depends on."""
        state: dict[str, Any] = {
            "position": self.position,
            "size": self.source.size,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "epoch_size": self.sampler.epoch_size,
        }
        samples = self.source.checksum()
        if samples is not None:
            state["samples"] = samples
        order = self.sampler.order
        if isinstance(order, CheckedOrder):
            state["order"] = order.fingerprint(self.seed)
        if isinstance(order, Lanes):
            state["shards"] = order.fingerprint()
            state["chunk"] = order.chunk
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that has been checked."""
        self.position = state["position"]
        if isinstance(self.sampler.order, Lanes):
            # The first run's batch size determined it; a different one now must not change the order.
            self.sampler.order.chunk = state["chunk"]


class _Blocks:
    """The sampler in the form of torch's DataLoader; keeps the blocks that are being loaded."""

    def __init__(self, sampler: RankSampler, position: int, until: int, block: int) -> None:
        self._arguments = (sampler, position, until, block)
        self.sent: list[list[LocalBatch]] = []

    def __iter__(self) -> Iterator[list[LocalBatch]]:
        sampler, position, until, block = self._arguments
        for shares in sampler.shares(position, until, block):
            self.sent.append(shares)
            yield shares


STATE_WORDS = {
    "kind": ("a dataset that is {}", "a dataset read at positions"),
    "size": ("a dataset of {:,} samples", ""),
    "seed": ("seed {}", ""),
    "shuffle": ("shuffle={}", ""),
    "epoch_size": ("epochs of {:,} samples (drop_last, batch_size)", ""),
    "order": ("a custom order (checksum {})", "no custom order"),
    "samples": ("samples of checksum {}", ""),
    "virtual_ranks": ("{} virtual ranks (exact='bits')", "no virtual ranks"),
    "threads": ("{} thread(s) per rank (exact='bits')", ""),
    "shards": ("shards and lanes of checksum {}", "a dataset without shards"),
}
"""For each key of a state, its description in an error, and that of a missing value."""

OF_BITS = ("virtual_ranks", "threads")
"""The keys of a state on which the bits of results depend, but not the samples."""


def check_state(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise DataError if `state` is of other data or another order than `here`."""
    for key, (text, none) in STATE_WORDS.items():
        if not none and not (key in state and key in here):
            continue
        ours, theirs = (
            text.format(each[key]) if each.get(key) is not None else none for each in (here, state)
        )
        if ours != theirs and key in OF_BITS:
            raise DataError(
                given=f"a Loader with {ours}",
                found=f"a checkpoint written with {theirs}: results would not be bit-identical",
                fix="pass the exact= and virtual_ranks= of that run to shoal.init, "
                "and use the same number of threads",
            )
        if ours != theirs:
            raise DataError(
                given=f"a Loader with {ours}",
                found=f"a checkpoint written with {theirs}: samples would be repeated or missed",
                fix="train on the same data in the same order, or start a new run in another run "
                "directory: shoal.Run('runs/b', …)",
            )


def _as_it_is(value: Any) -> Any:
    return value


def _begin_worker(_: int) -> None:
    end_if_unsent()
    _leave_the_end_to_the_rank()


def _leave_the_end_to_the_rank() -> None:
    """End this worker only on SIGTERM from its rank, if the rank handles SIGTERM, as an open Run does.

    A scheduler sends SIGTERM to all processes of a job, and the rank may need one more batch before
    it saves. Only a thread that waits for the signal learns which process sent it.
    """
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_when_the_rank_says_so, daemon=True).start()


def _end_when_the_rank_says_so() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


def timed(dataset: Dataset[Any], *, in_worker: bool) -> Dataset[Any]:
    """Return the same dataset, each item with the seconds that making it took.

    A rank with workers measures only its wait for them: almost nothing while they keep up. If all
    ranks' workers are too slow, only one rank waits for its workers, and the others wait for that rank.
    `in_worker` is True if workers load the items: a WorkerError then takes the place of an item.
    """
    if isinstance(dataset, IterableDataset):
        return _TimedIterable(dataset, in_worker)
    return _TimedItems(dataset, in_worker)


def _timed(load: Callable[[], Any], in_worker: bool) -> Any:
    begun = CLOCK.now()
    try:
        item = load()
    except StopIteration:
        raise
    except Exception as error:
        if not in_worker:
            raise
        return WorkerError(error)
    return TimedItem(item, CLOCK.now() - begun)


class _TimedItems(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], in_worker: bool) -> None:
        self._dataset = dataset
        self._in_worker = in_worker

    def __getitem__(self, index: Any) -> Any:
        return _timed(lambda: self._dataset[index], self._in_worker)


class _TimedIterable(IterableDataset[Any]):
    def __init__(self, dataset: IterableDataset[Any], in_worker: bool) -> None:
        self._dataset = dataset
        self._in_worker = in_worker

    def __iter__(self) -> Iterator[Any]:
        # An error where it begins counts as one of the first item.
        items = itertools.chain.from_iterable([self._dataset])
        while True:
            try:
                item = _timed(lambda: next(items), self._in_worker)
            except StopIteration:
                return
            yield item
