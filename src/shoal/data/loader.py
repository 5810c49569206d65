"""Global batches and their local batches: exact at any number of ranks, resumable at any sample."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from shoal.data.batch import Batch
from shoal.data.coupled import CoupledStep
from shoal.data.feed import Feed, Fetch, PositionedSource, check_state
from shoal.data.groups import Place
from shoal.data.iterable_dataset import BatchSplit, StreamSource
from shoal.data.map_dataset import BlockDataset, Collate, SampleSource
from shoal.data.micro import MicroBatch
from shoal.data.orders import SampleOrder, Shuffled, ordering
from shoal.data.prefetch import on_device
from shoal.data.sampler import LocalBatch, RankSampler
from shoal.data.shards import GROUPS, Lanes, ShardedDataset, counted
from shoal.data.tensor_dataset import source
from shoal.data.token_budget import BatchSize
from shoal.distributed.consistency import check_same_data, warn_of_other_arrays
from shoal.distributed.to_device import move
from shoal.distributed.world import World
from shoal.telemetry.step_timer import WAIT
from shoal.util.accelerator import is_accelerator
from shoal.util.arguments import is_integer
from shoal.util.errors import DataError


class Loader:
    """Data loader that splits a dataset into global batches and gives each rank its local batches.

    The order of an epoch depends on (seed, epoch) only, and the random numbers of a sample on (seed,
    epoch, position) only, not on the process that loads it: a dataset whose `__getitem__` has a
    parameter `rng` gets a numpy.random.Generator. The state of a Loader is one number: the position, in
    samples since the start of training. Creating a Loader for a ShardedDataset without lengths is
    collective.

    Args:
        dataset: A tensor, an array, a tuple or dict of them, any map-style dataset (of torch or Hugging
            Face), a ShardedDataset, or an IterableDataset. Every rank reads all of an IterableDataset,
            in the dataset's order.
        world: World that `shoal.init` returned.
        batch_size: Number of samples in a *global* batch, over all ranks and micro-batches, at least
            one for each micro-batch of each rank; or a TokenBudget, which chooses it batch by batch.
        micro_batches: Number of micro-batches in a local batch, for gradient accumulation. Default: 1.
        shuffle: Shuffle the samples, or the shards of a ShardedDataset; no effect with `order` or on an
            IterableDataset. Default: True.
        order: Replaces shuffling: a WeightedSampling, a torch Sampler that yields the same indices for
            the same epoch, or any object that implements SampleOrder. Default: None.
        drop_last: Drop the last batch of an epoch if it is short. Default: False.
        seed: Seed of the order and of the samples' random numbers. `None` takes the World's. Default:
            None.
        seed_transforms: Seed the generators of `random`, NumPy and torch before each sample. Default:
            False.
        collate_fn: Function that makes a micro-batch from a list of samples. `None` takes torch's
            `default_collate`. Default: None.
        num_workers: Worker processes of this rank, kept for all epochs; 0 loads in the rank itself.
            Default: 0.
        prefetch_factor: Batches that each worker loads ahead. `None` takes torch's, 2. Default: None.
        pin_memory: Copy batches into pinned memory. `None` does so if the device of the World is CUDA
            and the samples are in host memory. Default: None.

    Attributes:
        position: Position of the next batch, in samples since the start of training.
        epoch: Epoch of the next batch, from 0.
        epoch_size: Samples in an epoch; None for an IterableDataset before its first epoch has ended.
        batch: Batch that was yielded last, or None.

    Raises:
        DataError: If the dataset has no samples, no length or tensors of different lengths, or if
            `batch_size`, `micro_batches`, `num_workers`, `order` or `drop_last` does not fit it.

    Examples:
        >>> with shoal.init() as world:
        ...     loader = Loader(torch.arange(10), world, batch_size=4, shuffle=False)
        ...     [micro.tolist() for batch in loader.epochs(1) for micro in batch]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    load = 0.0
    """Seconds that loading the last batch took, in a worker if there are workers."""

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        batch_size: int | BatchSize,
        micro_batches: int = 1,
        shuffle: bool = True,
        order: SampleOrder | TorchSampler[Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        seed_transforms: bool = False,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        self.world = _checked_world(dataset, world)
        batch_size, micro_batches = check_sizes(batch_size, micro_batches, world.data_size)
        seed = _checked_seed(shuffle, world.seed if seed is None else seed)
        self._batch_size = batch_size
        self._drop_last = drop_last
        device = torch.device("cpu")
        self._feed: Feed
        if isinstance(dataset, IterableDataset):
            cutting = BatchSplit(
                batch_size=_fixed(batch_size, order),
                ranks=world.data_size,
                rank=world.data_rank,
                micro_batches=micro_batches,
                drop_last=drop_last,
                collate=collate_fn or default_collate,
                seed=seed,
                seed_transforms=seed_transforms,
            )
            self._feed = StreamSource(dataset, cutting)
        else:
            if isinstance(dataset, ShardedDataset):
                counted(dataset, world)
            share = -(-self.batch_size // world.data_size)
            samples = source(dataset, collate_fn, share, seed=seed, seed_transforms=seed_transforms)
            device = samples.device
            if isinstance(samples, SampleSource):
                samples.watched = world.is_rank_zero
            sampler = RankSampler(
                order=self._order(dataset, samples, order, shuffle),
                batch_size=batch_size,
                ranks=world.data_size,
                rank=world.data_rank,
                micro_batches=micro_batches,
                seed=seed,
                drop_last=drop_last,
            )
            _check_epoch(sampler, samples, drop_last)
            self._feed = PositionedSource(samples, sampler, shuffle=shuffle)
        if pin_memory is None:
            pin_memory = is_accelerator(world.device) and device.type == "cpu"
        check_fetch(device, num_workers, pin_memory)
        self._device = device
        self._fetch = Fetch(
            world=world,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
        )
        self.batch: Batch | None = None
        self._loads = 0
        self._compared = False
        self.goal: int | None = None
        """The position at which the loop ends, in samples since the start; None if not known."""

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        if self.epoch_size is None or not isinstance(self._batch_size, int):
            raise DataError(
                given="len(loader)",
                found="the number of batches in an epoch is known only after the epoch",
                fix="count them in the loop, or read the number of samples from loader.epoch_size, "
                "which may be None",
            )
        return math.ceil(self.epoch_size / self._batch_size)

    @property
    def position(self) -> int:
        """The position of the next batch, in samples since the start of training."""
        return self._feed.position

    @property
    def consumed(self) -> int:
        """The position of the first sample that no step has processed.

        A loop may end with a batch that it has fetched and not processed.
        """
        batch, position = self.batch, self.position
        if batch is None or batch.processed or batch.first + batch.size != position:
            return position
        return batch.resumes_at

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._feed.epoch

    @property
    def batch_size(self) -> int:
        """Number of samples in a global batch, or in the largest possible one if sizes vary."""
        return self._batch_size if isinstance(self._batch_size, int) else self._batch_size.max_samples

    def compare_ranks(self) -> None:
        """Raise AgreementError on all ranks if their data or orders differ. Collective.

        Compares once: a second call, such as that of the first batch after a Run's, returns at once.
        """
        if not self._compared:
            check_same_data(self.world, self.state_dict())
            warn_of_other_arrays(self.world, self._feed.held())
            self._compared = True

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Fetch and collate micro-batches of `sizes` samples each again, on the world's device.

        They begin at position `first`, or before it if the epoch would end in them. Returns None if
        samples can't be fetched again, as with an IterableDataset, or if an epoch has too few.
        """
        values = self._feed.again(first, sizes)
        return None if values is None else [move(value, self.world.device) for value in values]

    @property
    def feed(self) -> Feed:
        """The source of its local batches."""
        return self._feed

    @property
    def workers(self) -> int:
        """Number of worker processes of this rank; 0 if the rank loads its batches itself."""
        workers = self._fetch.num_workers
        return min(1, workers) if isinstance(self._feed, StreamSource) else workers

    def fetched_by(self, workers: int) -> Loader:
        """Return another Loader of the same batches, from the same position, with `workers` workers."""
        check_fetch(self._device, workers, self._fetch.pin_memory)
        other = copy.copy(self)
        other._feed = copy.copy(self._feed)
        other._fetch = dataclasses.replace(self._fetch, num_workers=workers)
        other.batch = None
        return other

    @property
    def epoch_size(self) -> int | None:
        """Number of samples in an epoch; None before an IterableDataset's first epoch has ended."""
        return self._feed.epoch_size

    def __iter__(self) -> NoReturn:
        """Raise DataError: a loop over a loader needs a number of epochs."""
        raise DataError(
            given="for batch in loader",
            found="no number of epochs",
            fix="for batch in loader.epochs(10): step(batch)",
        )

    def epochs(self, count: int) -> Iterator[Batch]:
        """Yield the batches up to the end of epoch `count`, counted from the start of training.

        After a restore, iteration continues in mid-epoch with the next sample that was not consumed. An
        epoch ends on all ranks in the same step.

        Args:
            count: Number of epochs since the start of training, an integer, 0 or more.

        Returns:
            An iterator over the batches of this rank.

        Raises:
            DataError: If `count` is not an integer, 0 or more.
        """
        if not is_integer(count):
            raise DataError(
                given=f"loader.epochs({count!r})",
                found="the number of epochs is an integer, 0 or more",
                fix="loader.epochs(10)",
            )
        self.goal = None if self.epoch_size is None else count * self.epoch_size
        return self._all_batches(count)

    def after(self, steps: int) -> int:
        """Return the position after `steps` more steps, in samples since the start.

        Assumes full batches if the length of an epoch or the sizes of batches are not known.
        """
        size, epoch = self.batch_size, self.epoch_size
        if epoch is None or not isinstance(self._batch_size, int):
            return self.position + steps * size
        begins, offset = self.position - self.position % epoch, self.position % epoch
        rest = math.ceil((epoch - offset) / size)
        if steps < rest:
            return self.position + steps * size
        epochs, more = divmod(steps - rest, len(self))
        return begins + (1 + epochs) * epoch + more * size

    def _all_batches(self, count: int) -> Iterator[Batch]:
        loads = None
        while loads != self._loads:  # a state was loaded within the loop
            loads = self._loads
            for batch in self._batches(count):
                yield batch
                if loads != self._loads:
                    break

    def _batches(self, count: int) -> Iterator[Batch]:
        timeline = self.world.timeline
        timeline.begin()
        unit = self.world.service(CoupledStep).unit()
        self._feed.cut_at(unit)
        shares = on_device(self._feed.shares(count, self._fetch), self.world.device, timeline)
        while True:
            with timeline.within(WAIT):  # a sample may fail, and the caller may continue nevertheless
                batch = self._next(shares, unit)
            if batch is None:
                return
            yield batch

    def _next(self, shares: Iterator[tuple[LocalBatch, list[Any]]], unit: int | None) -> Batch | None:
        begun = time.perf_counter()
        found = next(shares, None)
        if found is None:
            return None
        share, values = found
        count = len(share.cells)
        micros = [
            MicroBatch(
                value,
                share.first + cell.start,
                cell.stop - cell.start,
                cell.weight,
                self.world,
                Place(share.size, number, count, unit),
                share.first,
            )
            for number, (value, cell) in enumerate(zip(values, share.cells, strict=True))
        ]
        wait = time.perf_counter() - begun
        epoch = self._feed.epoch
        self._feed.consumed(share)
        self.load = share.load
        self.batch = Batch(
            share.first,
            share.size,
            micros,
            seed=self._feed.seed,
            wait=wait,
            world=self.world,
            loader=self,
            ends_epoch=self._feed.epoch != epoch,
        )
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the facts about the data and its order that it depends on.

        Returns:
            A dict of plain values: the position, the seed, the number of samples, checksums.
        """
        return self._feed.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Args:
            state: State that `state_dict` returned, on any number of ranks.

        Raises:
            DataError: If the data or their order differ; nothing changes.
        """
        self.check_state(state)
        self._feed.load(state)
        self._loads += 1
        self.batch = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if `state` belongs to different data or a different order; change nothing."""
        check_state(state, self._feed.state())

    def _order(self, dataset: Any, samples: BlockDataset, order: Any, shuffle: bool) -> SampleOrder:
        if not isinstance(dataset, ShardedDataset):
            if order is None:
                return Shuffled(samples.size, shuffle=shuffle)
            return ordering(order, samples.size)
        if order is not None:
            raise DataError(
                given="Loader(ShardedDataset(…), order=…)",
                found="shards are read in sequence, not at random",
                fix="leave order out; to weight samples, repeat shards or use a map-style dataset",
            )
        chunk = max(1, GROUPS * self.batch_size // dataset.interleave)
        return Lanes(dataset.lengths or (), lanes=dataset.interleave, chunk=chunk, shuffle=shuffle)


def _checked_world(dataset: Any, world: object) -> World:
    """Return the second argument of a Loader; raises DataError if it is not a World."""
    if not isinstance(world, World):
        raise DataError(
            given=f"Loader({type(dataset).__name__}, {type(world).__name__}, …)",
            found="the second argument is the World that shoal.init returns",
            fix="shoal.Loader(dataset, world, batch_size=64)",
        )
    return world


def _checked_seed(shuffle: object, seed: object) -> int:
    """Return the seed of the order. Raise DataError unless it is an integer and `shuffle` a boolean."""
    if not isinstance(shuffle, bool):
        raise DataError(
            given=f"Loader(shuffle={shuffle!r})", found="shuffle is a boolean", fix="shuffle=False"
        )
    if not is_integer(seed, least=-(2**63)):
        raise DataError(given=f"Loader(seed={seed!r})", found="a seed is an integer", fix="seed=0")
    return seed


def check_sizes(
    batch_size: int | BatchSize, micro_batches: int, ranks: int
) -> tuple[int | BatchSize, int]:
    """Return both arguments as integers. Raise DataError if a batch cannot fill every micro-batch."""
    sizes = (getattr(batch_size, "max_samples", batch_size), micro_batches)
    if not all(is_integer(size, least=1) for size in sizes):
        raise DataError(
            given=f"batch_size={batch_size!r}, micro_batches={micro_batches!r}",
            found="both must be positive integers",
            fix="pass batch_size=512, micro_batches=4",
        )
    if not isinstance(batch_size, int | np.integer):
        return batch_size, int(micro_batches)
    if batch_size < ranks * micro_batches:
        raise DataError(
            given=f"batch_size={batch_size}, micro_batches={micro_batches}, on {ranks} data rank(s)",
            found=f"{batch_size} sample(s) for {ranks} x {micro_batches} micro-batches: "
            f"{ranks * micro_batches - batch_size} of them would never get one",
            fix=f"batch_size={ranks * micro_batches} or more, counted over all ranks",
        )
    return int(batch_size), int(micro_batches)


def _fixed(batch_size: int | BatchSize, order: Any) -> int:
    """Return the batch size of an IterableDataset; raises DataError if it is not constant."""
    if order is None and isinstance(batch_size, int):
        return batch_size
    raise DataError(
        given="Loader(IterableDataset, …) with order= or a batch_size that varies",
        found="an IterableDataset has no random access",
        fix="use a map-style dataset, or yield the samples in the order that you want",
    )


def _check_epoch(sampler: RankSampler, samples: BlockDataset, drop_last: bool) -> None:
    if drop_last and not sampler.fixed:
        raise DataError(
            given=f"batch_size={type(sampler.batch_size).__name__}, drop_last=True",
            found="batches vary in size, so no batch is short",
            fix="leave drop_last out",
        )
    if sampler.epoch_size == 0:
        raise DataError(
            given=f"batch_size={sampler.largest}, drop_last={drop_last}",
            found=f"a dataset of {samples.size} samples and an order of {len(sampler.order)}: no batch "
            "in an epoch, every batch would be dropped",
            fix="use a smaller batch_size, or drop_last=False, which is exact too",
        )


def check_fetch(device: torch.device, num_workers: int, pin_memory: bool) -> None:
    """Raise DataError for a wrong number of workers, or samples that workers cannot read."""
    if not is_integer(num_workers):
        raise DataError(
            given=f"Loader(…, num_workers={num_workers!r})",
            found="the number of worker processes is an integer, 0 or more",
            fix="pass num_workers=4, or leave it out to load in this process",
        )
    if device.type != "cpu" and (num_workers or pin_memory):
        raise DataError(
            given=f"Loader(tensors on {device}, num_workers={num_workers}, pin_memory={pin_memory})",
            found="worker processes can't read device memory, and only host memory can be pinned",
            fix="use num_workers=0 without pin_memory, because the tensors are already loaded; or "
            "call tensor.cpu()",
        )
