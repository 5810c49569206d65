"""Samples in shards: files, archives and tables that are read in sequence from a given sample."""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from shoal._torch.dataloader import leave_worker
from shoal.data.map_dataset import GLOBAL_STREAM, Collate, SampleSource, draws, set_global_generators
from shoal.data.orders import Indices
from shoal.data.permutation import Permutation
from shoal.data.sampler import LocalBatch
from shoal.distributed.world import World
from shoal.util.clock import CLOCK
from shoal.util.errors import DataError

Shard = TypeVar("Shard")

GROUPS = 4
"""Batches per round over all lanes, so that each of 1, 2 or 4 workers has its own lanes."""
SKIPPED = 1024
"""The most samples to read and drop before the shard is opened again instead."""


class ShardedDataset(Generic[Shard]):
    """A dataset in shards (files, archives, tables), each read in sequence.

    In each epoch, the shards are in an order that is shuffled by (seed, epoch). Shoal distributes them
    over `interleave` lanes and takes a few samples from each lane in turn. The lanes do not depend on
    the number of ranks or workers, so these numbers do not change which sample is at a position. If
    `interleave / 4` is a multiple of the number of ranks, and there are 1, 2 or 4 workers, each process
    reads only its own lanes; otherwise several processes read the same shards. The samples of a shard
    stay in order; `interleave=1` with `shuffle=False` keeps the order of all samples.

    For a Hugging Face IterableDataset: `ShardedDataset(range(d.num_shards), lambda i, start:
    d.shard(d.num_shards, i).skip(start))`.

    Args:
        shards: Shards, such as paths, in any fixed order; at least one.
        read: Function `read(shard, start)` that yields the samples of a shard from number `start` on:
            it seeks if the format allows it, and otherwise uses `itertools.islice(samples, start,
            None)`.
        lengths: Number of samples of each shard. A shard with a different number raises DataError
            while it is read. `None`: the ranks count the samples together when the Loader is made.
            Default: None.
        interleave: Number of shards that are read alternately, 1 or more. Default: 32.

    Raises:
        DataError: If there is no shard, `interleave` is below 1, or `lengths` does not have one number
            for each shard.

    Examples:
        >>> shards = [range(0, 3), range(3, 8)]
        >>> dataset = shoal.ShardedDataset(shards, lambda shard, start: shard[start:], lengths=[3, 5])
        >>> with shoal.init() as world:
        ...     loader = shoal.Loader(dataset, world, batch_size=8, shuffle=False)
        ...     [micro.tolist() for batch in loader.epochs(1) for micro in batch]
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        read: Callable[[Shard, int], Iterable[Any]],
        *,
        lengths: Sequence[int] | None = None,
        interleave: int = 32,
    ) -> None:
        self.shards: list[Shard] = list(shards)
        self.read = read
        self.interleave = interleave
        self.lengths: list[int] | None = None if lengths is None else [int(n) for n in lengths]
        if not self.shards or interleave < 1:
            raise DataError(
                given=f"ShardedDataset of {len(self.shards)} shards, interleave={interleave}",
                found="no shards, or interleave below 1",
                fix="shoal.ShardedDataset(sorted(folder.glob('*.jsonl')), read)",
            )
        if self.lengths is not None and (
            len(self.lengths) != len(self.shards) or min(self.lengths) < 0
        ):
            raise DataError(
                given=f"ShardedDataset of {len(self.shards)} shards with {len(self.lengths)} lengths",
                found="lengths has one number of samples, 0 or more, for each shard",
                fix="leave lengths out, and Shoal counts the samples",
            )

    def count(self, shard: int) -> int:
        """Count the samples of a shard by reading it.

        Args:
            shard: Number of the shard, from 0.

        Returns:
            The number of its samples.
        """
        return sum(1 for _ in self.read(self.shards[shard], 0))


class Lanes:
    """The order of a sharded dataset: its shuffled shards, concatenated and split into equal lanes.

    A lane may begin and end in mid-shard, so that all lanes end together and no rank runs out of
    samples before the others. The lanes are read in turn, `chunk` samples each, then the rest of each.
    """

    def __init__(self, lengths: Sequence[int], *, lanes: int, chunk: int, shuffle: bool) -> None:
        self.chunk = chunk
        self._lanes = lanes
        self._shuffle = shuffle
        self._lengths = np.array(lengths, dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._size = int(self._lengths.sum())
        self._order: Permutation | None = None
        self._laid = self._ends = self._starts

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices at `positions`, numbered in the order of the user's shards."""
        self._lay(seed, epoch)
        places = self.places(positions)
        found = np.searchsorted(self._ends, places, side="right")
        shards = self._laid[found]
        begin = self._ends[found] - self._lengths[shards]
        indices: Indices = self._starts[shards] + (places - begin)
        return indices

    def places(self, positions: Indices) -> Indices:
        """Return the places of `positions` in the concatenated shards."""
        begins = np.arange(self._lanes + 1, dtype=np.int64) * self._size // self._lanes
        whole = self._size // self._lanes // self.chunk * self.chunk
        number, within = np.divmod(positions, self.chunk)
        turn, lane = np.divmod(number, self._lanes)
        in_turn = begins[lane] + turn * self.chunk + within
        # After the full rounds each lane has at most a chunk left, which is taken sample by sample.
        rest = begins - whole * np.arange(self._lanes + 1)
        left = np.maximum(positions - whole * self._lanes, 0)
        last = np.minimum(np.searchsorted(rest, left, side="right") - 1, self._lanes - 1)
        leftover = begins[last] + whole + left - rest[last]
        return np.where(positions < whole * self._lanes, in_turn, leftover)

    def fingerprint(self) -> int:
        """Return a checksum of the inputs of the order."""
        what = np.concatenate([[self._lanes], self._lengths]).astype("<i8")
        return zlib.crc32(what.tobytes())

    def _lay(self, seed: int, epoch: int) -> None:
        """Find the shards in the order of an epoch, and the end of each."""
        order = self._order
        if order is None or (order.seed, order.epoch) != (seed, epoch):
            order = Permutation(len(self._lengths), seed=seed, epoch=epoch, shuffle=self._shuffle)
            self._order = order
            self._laid = order.indices(0, len(self._lengths))
            self._ends = np.cumsum(self._lengths[self._laid])


class ShardSource(SampleSource):
    """The source of a ShardedDataset: shards stay open from one local batch to the next."""

    def __init__(
        self, stream: ShardedDataset[Any], collate: Collate, seed: int, *, seed_transforms: bool
    ) -> None:
        super().__init__(collate, seed, seed_transforms=seed_transforms)
        self._stream = stream
        self._lengths = np.array(stream.lengths, dtype=np.int64)
        self._ends = np.cumsum(self._lengths)
        self._open: dict[tuple[int, int], Iterator[Any]] = {}  # by (shard, next sample), oldest first
        self.size = int(self._lengths.sum())

    def checksum(self) -> str | None:
        """Return a checksum of the file names: shards of equal length may have changed places."""
        shards = self._stream.shards
        names = [Path(shard).name for shard in shards if isinstance(shard, str | os.PathLike)]
        if len(names) < len(shards):
            return None
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]

    def samples(self, share: LocalBatch) -> list[Any]:
        """See SampleSource."""
        shards = np.searchsorted(self._ends, share.indices, side="right")
        offsets = share.indices - (self._ends - self._lengths)[shards]
        generators = draws(share, self._seed, GLOBAL_STREAM) if self.seed_transforms else None
        found = []
        for number, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            samples = self._open.pop((shard, offset), None) or self._at(shard, offset)
            if generators is not None:
                set_global_generators(generators[number])
            found.append(self._next(samples, shard, offset))
        return found

    def _at(self, shard: int, offset: int) -> Iterator[Any]:
        """Return the shard from sample `offset` on: one open shortly before it, or a new iterator."""
        near = range(offset - 1, offset - 1 - SKIPPED, -1)
        behind = [place for number, place in self._open if number == shard and place in near]
        if behind:
            samples = self._open.pop((shard, max(behind)))
            skipped = offset - max(behind)
            next(itertools.islice(samples, skipped, skipped), None)
            return samples
        while len(self._open) > 2 * self._stream.interleave:
            del self._open[next(iter(self._open))]
        leave_worker()  # a stream that saw the worker would yield only the samples of its number
        return iter(self._stream.read(self._stream.shards[shard], offset))

    def _next(self, samples: Iterator[Any], shard: int, offset: int) -> Any:
        length = int(self._lengths[shard])
        sample = next(samples, _END)
        if sample is _END:
            raise self._other_length(shard, f"it ended before sample {offset:,} of {length:,}")
        if offset + 1 < length:
            self._open[shard, offset + 1] = samples
        elif next(samples, _END) is not _END:
            raise self._other_length(shard, f"it continues after {length:,} samples")
        return sample

    def _other_length(self, shard: int, found: str) -> DataError:
        return DataError(
            given=f"ShardedDataset: shard {self._stream.shards[shard]!r} (number {shard}) of "
            f"{self._lengths[shard]:,} samples",
            found=found,
            fix="let lengths give the number of samples that `read` yields for each shard, or leave "
            "lengths out; `read(shard, start)` starts at sample number `start`, counted from 0",
        )


_END = object()


def counted(stream: ShardedDataset[Any], world: World) -> list[int]:
    """Return the lengths of a dataset's shards; all ranks together count unknown ones. Collective."""
    if stream.lengths is None:
        begun = CLOCK.now()
        mine: list[int] = []
        error: Exception | None = None
        try:
            mine = [stream.count(n) for n in range(world.rank, len(stream.shards), world.size)]
        except Exception as caught:
            error = caught
        parts = world.gather((mine, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(parts):
            if failure is not None:
                raise DataError(
                    given=f"counting the samples of {len(stream.shards)} shards of a ShardedDataset",
                    found=f"rank {rank} could not read one: {failure}",
                    fix="see that rank's own error; with ShardedDataset(…, lengths=…), no rank has "
                    "to count",
                )
        stream.lengths = [parts[n % world.size][0][n // world.size] for n in range(len(stream.shards))]
        world.print(
            f"counted {sum(stream.lengths):,} samples in {len(stream.shards):,} shards in "
            f"{CLOCK.now() - begun:.1f} s; shoal.ShardedDataset(…, lengths=…) saves this time"
        )
    return stream.lengths
