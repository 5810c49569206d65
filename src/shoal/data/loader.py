"""Global batches and their local batches: exact at any number of ranks, resumable at any sample."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from shoal.data.batch import Batch
from shoal.data.coupling.step import CoupledStep
from shoal.data.feed import Feed, Fetch, PositionedSource, check_state
from shoal.data.iterable_dataset import BatchSplit, StreamSource
from shoal.data.loader_arguments import (
    MEASURED,
    check_epoch,
    check_fetch,
    check_partners,
    check_seed,
    check_shares,
    check_sizes,
    check_world,
    copied,
    fixed_size,
    parts_of,
)
from shoal.data.map_dataset import BlockDataset, Collate, SampleSource
from shoal.data.micro import MicroBatch, Place
from shoal.data.orders import SampleOrder, Shuffled, ordering
from shoal.data.prefetch import on_device
from shoal.data.sampler import LocalBatch, RankSampler
from shoal.data.shards import GROUPS, Lanes, ShardedDataset, counted
from shoal.data.skipped_batches import LeftOutBatch, ends_epoch, is_left_out
from shoal.data.speed_balance import SpeedBalance
from shoal.data.tensor_dataset import source
from shoal.data.token_budget import BatchSize
from shoal.distributed.consistency import check_same_data, warn_of_other_arrays
from shoal.distributed.to_device import move
from shoal.distributed.virtual_ranks import VirtualRanks, virtual_ranks_of
from shoal.distributed.world import World
from shoal.telemetry.step_timer import WAIT
from shoal.util.accelerator import is_accelerator
from shoal.util.arguments import check_integer, integer_like
from shoal.util.clock import CLOCK
from shoal.util.errors import DataError


class Loader:
    """Data loader that splits a dataset into global batches and gives each rank its local batches.

    The order of an epoch depends on (seed, epoch) only. The random numbers of a sample depend on (seed,
    epoch, position) only, not on the process that loads it: if `__getitem__` of the dataset has a
    parameter `rng`, it gets a numpy.random.Generator. The state of a Loader is one number: the
    position, in samples since the start of training. Creating a Loader for a ShardedDataset without
    lengths is collective.

    Args:
        dataset: A tensor, an array, a tuple or dict of them, any map-style dataset (of torch or Hugging
            Face), a ShardedDataset, or an IterableDataset. Every rank reads all of an IterableDataset,
            in the dataset's order.
        world: World that `shoal.init` returned.
        batch_size: Number of samples in a *global* batch, over all ranks and micro-batches, at least
            one for each micro-batch of each rank; or a TokenBudget, which chooses the number for each
            batch.
        micro_batches: Number of micro-batches in a local batch, for gradient accumulation. Default: 1.
        shuffle: Shuffle the samples, or the shards of a ShardedDataset; no effect with `order` or on an
            IterableDataset. Default: True.
        order: Replaces shuffling: a WeightedSampling, a torch Sampler that yields the same indices for
            the same epoch, or any object that implements SampleOrder. Default: None.
        drop_last: Drop the last batch of an epoch if it is short. Default: False.
        seed: Seed of the order and of the samples' random numbers. `None` takes the World's seed.
            Default: None.
        seed_transforms: Seed the generators of `random`, NumPy and torch before each sample. Default:
            False.
        collate_fn: Function that makes a micro-batch from a list of samples. `None` takes torch's
            `default_collate`. Default: None.
        num_workers: Worker processes of this rank, kept for all epochs; 0 loads in the rank itself.
            Default: 0.
        prefetch_factor: Batches that each worker loads ahead. `None` takes torch's, 2. Default: None.
        pin_memory: Copy batches into pinned memory. `None` does so if the device of the World is CUDA
            and the samples are in host memory. Default: None.
        shares: "equal" gives each data-parallel rank equally many samples of a batch. "measured"
            measures the speed of the ranks and gives slower ones fewer samples; then iteration is
            collective, and the state of the Loader includes the numbers of samples. Default: "equal".
        partners: Number of partners of each sample from its global batch, for mixup and CutMix, at
            least 0 and below `batch_size`. A micro-batch is then a tuple of collated samples: the
            samples, their first partners, …. On one process, the n-th partners of all samples `x` are
            `x.roll(n, 0)`. Default: 0.

    Attributes:
        position: Position of the next batch, in samples since the start of training.
        epoch: Epoch of the next batch, from 0.
        epoch_size: Samples in an epoch; None for an IterableDataset before its first epoch has ended.
        batch: Batch that was yielded last, or None.

    Raises:
        DataError: If the dataset has no samples, no length or tensors of different lengths, or if
            `batch_size`, `micro_batches`, `num_workers`, `order`, `drop_last`, `shares` or `partners`
            does not fit it.

    Examples:
        >>> with shoal.init() as world:
        ...     loader = Loader(torch.arange(10), world, batch_size=4, shuffle=False)
        ...     [micro.tolist() for batch in loader.epochs(1) for micro in batch]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        >>> with shoal.init() as world:
        ...     loader = Loader(torch.arange(4), world, batch_size=4, shuffle=False, partners=1)
        ...     [[part.tolist() for part in micro] for batch in loader.epochs(1) for micro in batch]
        [[[0, 1, 2, 3], [3, 0, 1, 2]]]
    """

    load = 0.0
    """Seconds that loading the last batch took, in a worker if there are workers."""
    goal: int | None = None
    """The position at which the loop ends, in samples since the start; None if not known."""
    balance: SpeedBalance | None = None
    """Measures the speed of the ranks; None if each gets equally many samples."""

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
        shares: str = "equal",
        partners: int = 0,
    ) -> None:
        self.world = check_world(dataset, world)
        parts = parts_of(dataset, micro_batches, world)
        batch_size, micro_batches = check_sizes(batch_size, micro_batches, parts)
        seed = check_seed(shuffle, world.seed if seed is None else seed)
        self._batch_size = batch_size
        partners = check_partners(partners, self.batch_size)
        device = torch.device("cpu")
        self._feed: Feed
        if isinstance(dataset, IterableDataset):
            cutting = BatchSplit(
                batch_size=fixed_size(batch_size, order),
                ranks=world.data_size,
                rank=world.data_rank,
                micro_batches=micro_batches,
                drop_last=drop_last,
                collate=collate_fn or default_collate,
                seed=seed,
                seed_transforms=seed_transforms,
                partners=partners,
            )
            self._feed = StreamSource(dataset, cutting)
        else:
            samples = self._source(dataset, collate_fn, seed, seed_transforms=seed_transforms)
            device = samples.device
            sampler = RankSampler(
                order=self._order(dataset, samples, order, shuffle),
                batch_size=batch_size,
                ranks=world.data_size,
                rank=world.data_rank,
                micro_batches=micro_batches,
                seed=seed,
                drop_last=drop_last,
                virtual=world.virtual_ranks,
                partners=partners,
            )
            check_epoch(sampler, samples, drop_last)
            self._feed = PositionedSource(samples, sampler, shuffle=shuffle)
        if pin_memory is None:
            pin_memory = is_accelerator(world.device) and device.type == "cpu"
        check_fetch(device, num_workers, pin_memory)
        self._device = device
        self._fetch = Fetch(
            world=world, num_workers=num_workers, prefetch_factor=prefetch_factor, pin_memory=pin_memory
        )
        self.batch: Batch | None = None
        self.left_out: list[LeftOutBatch] = []
        self._loads, self._compared = 0, False
        check_shares(shares, dataset, world)
        if shares == MEASURED:
            self.balance = SpeedBalance(world, self.batch_size, least=micro_batches)

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

    @property
    def measures_speed(self) -> bool:
        """Whether slower ranks get fewer samples."""
        return self.balance is not None

    def compare_ranks(self) -> None:
        """Raise AgreementError on all ranks if their data or orders differ. Collective.

        Compares once: a second call, such as that of the first batch after a Run's, returns at once.
        """
        if not self._compared:
            check_same_data(self.world, self.state_dict())
            warn_of_other_arrays(self.world, self._feed.held())
            self._compared = True

    def again(self, first: int, sizes: tuple[int, ...]) -> list[Any] | None:
        """Fetch again micro-batches of `sizes` samples each, collated and on the world's device.

        They begin at position `first`, or earlier if the epoch has too few samples after `first`.
        Returns None if samples can't be fetched again, as with an IterableDataset, or if an epoch
        has too few samples.
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
            found="a loop over a loader needs a number of epochs",
            fix="for batch in loader.epochs(10): step(batch)",
        )

    def epochs(self, count: int) -> Iterator[Batch]:
        """Yield the batches up to the end of epoch `count`, counted from the start of training.

        After a restore, iteration continues in the middle of an epoch, at the first sample that no step
        has processed. An epoch ends on all ranks in the same step.

        Args:
            count: Number of epochs since the start of training, an integer, 0 or more.

        Returns:
            An iterator over the batches of this rank.

        Raises:
            DataError: If `count` is not an integer, 0 or more.
        """
        check_integer(
            DataError,
            "loader.epochs",
            "count",
            count,
            fix=f"loader.epochs({integer_like(count, 10)})",
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
        balance = self.balance
        if balance is not None:
            balance.begin()
        while True:
            with timeline.within(WAIT):  # a sample may fail, and the caller may continue nevertheless
                batch = self._next(shares, unit)
            if batch is None:
                return
            yield batch
            if balance is not None and balance.after_step(self._feed.position):
                self._feed.split_by(balance.shares)
                # Batches that were fetched ahead are split in the old way.
                shares = on_device(self._feed.shares(count, self._fetch), self.world.device, timeline)

    def _next(self, shares: Iterator[tuple[LocalBatch, list[Any]]], unit: int | None) -> Batch | None:
        begun = CLOCK.now()
        found = next(shares, None)
        while found is not None and is_left_out(self.left_out, found[0].first, found[0].size):
            self._feed.consumed(found[0])
            found = next(shares, None)
        if found is None:
            return None
        share, values = found
        micros = self._micros(share, values, unit, self.world.virtual_ranks)
        wait = CLOCK.now() - begun
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
            epoch=epoch,
            ends_epoch=self._feed.epoch != epoch or ends_epoch(self.left_out, self._feed.position),
        )
        return self.batch

    def _micros(
        self, share: LocalBatch, values: list[Any], unit: int | None, virtual: VirtualRanks | None
    ) -> list[MicroBatch]:
        start, count = (0, len(share.cells)) if virtual is None else (virtual.start, virtual.total)
        return [
            MicroBatch(
                # A kernel may round by the alignment of its input: not as a part of a larger tensor.
                value if virtual is None else move(value, self.world.device, copied),
                share.first + cell.start,
                cell.stop - cell.start,
                cell.weight,
                self.world,
                Place(share.size, number, count, unit, virtual is not None, self._feed.proportions),
                share.first,
            )
            for number, (value, cell) in enumerate(zip(values, share.cells, strict=True), start)
        ]

    def micros_of(self, rank: int, first: int, size: int) -> list[MicroBatch]:
        """Fetch the virtual ranks of a batch that `rank` computes, with the samples of that rank.

        The batch has `size` samples from position `first` on.
        """
        own, feed = self.world.virtual_ranks, self._feed
        if own is None or not isinstance(feed, PositionedSource):
            raise NotImplementedError("a batch without virtual ranks")
        virtual = virtual_ranks_of(rank, ranks=self.world.size, total=own.total)
        share, values = feed.fetch(first, size, virtual)
        moved = [move(value, self.world.device) for value in values]
        return self._micros(share, moved, feed.sampler.unit, virtual)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the facts about the data and their order that must not change.

        Returns:
            A dict of plain values: the position, the seed, the number of samples, checksums.
        """
        state = self._feed.state()
        virtual = self.world.virtual_ranks
        if virtual is not None:
            state |= {"virtual_ranks": virtual.total, "threads": torch.get_num_threads()}
        if self.balance is not None:
            state["shares"] = list(self.balance.shares)
        if self.left_out:
            state["left_out"] = [list(each) for each in self.left_out]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Args:
            state: State that `state_dict` returned, on any number of ranks.

        Raises:
            DataError: If the data or their order differ; nothing changes.
        """
        self.check_state(state)
        self._feed.load(state)
        if self.balance is not None:
            self._feed.split_by(self.balance.load(state.get("shares", ())))
        self.left_out = [LeftOutBatch(*each) for each in state.get("left_out", ())]
        self._loads += 1
        self.batch = None

    def leave_out(self, batches: Sequence[LeftOutBatch]) -> None:
        """Yield these batches no more; those of earlier calls neither."""
        self.left_out = sorted({*self.left_out, *batches})

    def replay(self, changes: Mapping[int, Sequence[int]], until: int) -> None:
        """Split batches as an earlier attempt did, which reached the position `until`.

        `changes` has its numbers of samples of each rank, by the position from which they hold.
        """
        balance = self.balance
        if balance is not None and balance.replay(changes, until, position=self.position):
            self._feed.split_by(balance.shares)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if `state` belongs to different data or a different order; change nothing."""
        check_state(state, self.state_dict())

    def _source(
        self, dataset: Any, collate: Collate | None, seed: int, *, seed_transforms: bool
    ) -> BlockDataset:
        """Return the samples of a dataset with random access."""
        if isinstance(dataset, ShardedDataset):
            counted(dataset, self.world)
        share = -(-self.batch_size // self.world.data_size)
        samples = source(dataset, collate, share, seed=seed, seed_transforms=seed_transforms)
        if isinstance(samples, SampleSource):
            samples.watched = self.world.is_rank_zero
        return samples

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
