"""The samples of each global batch that a rank processes: pure arithmetic on positions.

A global batch of B samples starts at some position of the epoch's order. It is split into ranks x
micro-batches cells, rank by rank, whose sizes differ by at most one, or follow measured speeds. Only
the boundaries of the cells depend on the number of ranks and micro-batches. If layers take statistics
over groups of samples, no group is in two micro-batches (groups.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from shoal.data.coupling.groups import piece
from shoal.data.micro import Place
from shoal.data.orders import Indices, SampleOrder
from shoal.data.token_budget import BatchSize
from shoal.distributed.virtual_ranks import VirtualRanks
from shoal.util.errors import DataError

ORDER_BLOCK = 4096
"""Positions of one rank whose order is evaluated at once: small enough to seek in microseconds."""


class PositionRange(NamedTuple):
    """Positions [start, stop) relative to the batch; `weight` 0 marks a padding sample.

    Every rank runs the same number of micro-batches. One without samples runs the batch's first
    sample with weight 0, because an empty batch breaks collate functions, reshapes and means.
    """

    start: int
    stop: int
    weight: float


class LocalBatch(NamedTuple):
    """The local batch of one rank: its cells, and the dataset indices of the samples to fetch.

    `first` is the position of the batch's first sample since the start of training. Sources without a
    known length set `ends` for the last batch of an epoch. `load` is the number of seconds that
    loading the values took, once they are loaded. `partners` is the number of partners of each sample;
    a value is then a tuple of the samples of a cell and of each partner.
    """

    first: int
    size: int
    cells: tuple[PositionRange, ...]
    indices: Indices
    ends: bool = False
    load: float = 0.0
    partners: int = 0

    @property
    def fetched(self) -> tuple[PositionRange, ...]:
        """The positions of `indices`."""
        return fetched(self.cells, self.size, self.partners)

    def rows(self) -> list[Any]:
        """Return slices or indices into the fetched samples: of each cell, then of its partners."""
        if not self.partners:
            ends = [0, *accumulate(cell.stop - cell.start for cell in self.cells)]
            return [slice(start, stop) for start, stop in pairwise(ends)]
        places = positions_of(self.fetched)
        return [
            np.searchsorted(places, np.arange(cell.start - back, cell.stop - back) % self.size)
            for cell in self.cells
            for back in range(self.partners + 1)
        ]

    def together(self, values: list[Any]) -> list[Any]:
        """Return the micro-batches, from values in the order of `rows`."""
        if not self.partners:
            return values
        step = self.partners + 1
        return [tuple(values[start : start + step]) for start in range(0, len(values), step)]


def fetched(cells: tuple[PositionRange, ...], size: int, partners: int) -> tuple[PositionRange, ...]:
    """Return the positions to fetch for the cells of a rank in a batch of `size` samples.

    Those of partners precede each sample, as if the batch was a ring. No sample is fetched twice.
    """
    if not partners:
        return cells
    places = np.unique(
        np.concatenate([np.arange(cell.start - partners, cell.stop) % size for cell in cells])
    )
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return tuple(PositionRange(int(run[0]), int(run[-1]) + 1, 1.0) for run in runs)


def positions_of(ranges: Sequence[PositionRange]) -> Indices:
    """Return the positions in some ranges, one after the other."""
    return np.concatenate([np.arange(each.start, each.stop) for each in ranges])


def cut(
    size: int,
    *,
    ranks: int,
    rank: int,
    micro_batches: int,
    unit: int | None = None,
    virtual: VirtualRanks | None = None,
    proportions: tuple[int, ...] | None = None,
) -> tuple[PositionRange, ...]:
    """Return the cells of `rank` in a batch of `size` samples; see `piece` in groups.py.

    With `virtual` ranks, they are those of the micro-batches of one process, whose bounds do not depend
    on the number of ranks.
    """
    if virtual is not None:
        cells = cut(size, ranks=1, rank=0, micro_batches=virtual.total, unit=unit)
        return cells[virtual.start : virtual.stop]
    found = []
    for number in range(micro_batches):
        place = Place(size, number, micro_batches, unit, proportions=proportions)
        start, stop = piece(place, ranks=ranks, rank=rank)
        found.append(PositionRange(start, stop, 1.0) if stop > start else PositionRange(0, 1, 0.0))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RankSampler:
    """The local batches of one rank from any position on: the order, split into batches and cells.

    `batch_size` is the size of every global batch, or a function that chooses it from the next
    samples. With `drop_last` an epoch ends before a batch that would be short. Micro-batches are cut at
    multiples of `unit` samples. Ranks get samples in the `proportions` given; None is equally many.
    Each sample comes with as many `partners`.
    """

    order: SampleOrder
    batch_size: int | BatchSize
    ranks: int
    rank: int
    micro_batches: int
    seed: int
    drop_last: bool
    unit: int | None = None
    virtual: VirtualRanks | None = None
    proportions: tuple[int, ...] | None = None
    partners: int = 0

    @cached_property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        size = len(self.order)
        return size - size % self.largest if self.drop_last else size

    @property
    def fixed(self) -> bool:
        """True if all batches except the last of an epoch have the same size."""
        return isinstance(self.batch_size, int)

    @cached_property
    def largest(self) -> int:
        """The largest possible size of a batch."""
        return self.batch_size if isinstance(self.batch_size, int) else self.batch_size.max_samples

    @cached_property
    def _full(self) -> tuple[PositionRange, ...]:
        return self._cut(self.largest)

    def _cut(self, size: int) -> tuple[PositionRange, ...]:
        return cut(
            size,
            ranks=self.ranks,
            rank=self.rank,
            micro_batches=self.micro_batches,
            unit=self.unit,
            virtual=self.virtual,
            proportions=self.proportions,
        )

    def shares(self, position: int, until: int, block: int) -> Iterator[list[LocalBatch]]:
        """Yield the local batches from `position` to `until`, in lists of up to `block`.

        All batches of a list are of one epoch. The order is evaluated for many batches at once.
        """
        while position < until:
            epoch, offset = divmod(position, self.epoch_size)
            end = min(self.epoch_size, until - epoch * self.epoch_size)
            within = self._equal if isinstance(self.batch_size, int) else self._decided
            yield from within(epoch, offset, end, block)
            position = epoch * self.epoch_size + end

    def local_batch(self, first: int, size: int) -> LocalBatch:
        """Return the local batch of the batch of `size` samples from position `first` on."""
        epoch, offset = divmod(first, self.epoch_size)
        cells = self._cut(size)
        positions = positions_of(fetched(cells, size, self.partners))
        indices = self._take(epoch, offset + positions)
        return LocalBatch(first, size, cells, indices, partners=self.partners)

    def _equal(self, epoch: int, offset: int, end: int, block: int) -> Iterator[list[LocalBatch]]:
        share = -(-self.largest // self.ranks)
        ahead = block * max(1, ORDER_BLOCK // (share * block)) * self.largest
        for start in range(offset, end, ahead):
            shares = self._block(epoch, start, min(end, start + ahead))
            for first in range(0, len(shares), block):
                yield shares[first : first + block]

    def _decided(self, epoch: int, offset: int, end: int, block: int) -> Iterator[list[LocalBatch]]:
        shares: list[LocalBatch] = []
        while offset < end:
            upcoming = self._take(epoch, np.arange(offset, min(end, offset + self.largest)))
            size = self._decide(upcoming)
            cells, first = self._cut(size), epoch * self.epoch_size + offset
            mine = upcoming[positions_of(fetched(cells, size, self.partners))]
            shares.append(LocalBatch(first, size, cells, mine, partners=self.partners))
            offset += size
            if len(shares) == block or offset >= end:
                yield shares
                shares = []

    def _decide(self, upcoming: Indices) -> int:
        rule = self.batch_size
        size = rule if isinstance(rule, int) else rule(upcoming)
        if not isinstance(size, int | np.integer) or not 1 <= size <= len(upcoming):
            raise DataError(
                given=f"batch_size={type(rule).__name__}, called with the next {len(upcoming)} samples",
                found=f"it returned {size!r}",
                fix="return an integer from 1 to len(indices)",
            )
        return int(size)

    def _take(self, epoch: int, positions: Indices) -> Indices:
        return self.order.take(positions, seed=self.seed, epoch=epoch)

    def _block(self, epoch: int, offset: int, stop: int) -> list[LocalBatch]:
        base = epoch * self.epoch_size
        starts = range(offset, stop, self.largest)
        sizes = [min(self.largest, stop - start) for start in starts]
        cut = [self._full if size == self.largest else self._cut(size) for size in sizes]
        ranges = [fetched(cells, size, self.partners) for size, cells in zip(sizes, cut, strict=True)]
        positions = np.concatenate(
            [
                np.arange(start + each.start, start + each.stop)
                for start, parts in zip(starts, ranges, strict=True)
                for each in parts
            ]
        )
        indices = self._take(epoch, positions)
        shares, taken = [], 0
        for start, size, cells, parts in zip(starts, sizes, cut, ranges, strict=True):
            count = sum(each.stop - each.start for each in parts)
            mine = indices[taken : taken + count]
            shares.append(LocalBatch(base + start, size, cells, mine, partners=self.partners))
            taken += count
        return shares
