"""Which samples a rank takes of each global batch: pure arithmetic on positions.

A global batch of B samples starts at some position of the epoch's order. It is cut into ranks x
micro-batches cells, rank by rank, as evenly as whole samples allow. Nothing depends on the number of
ranks or micro-batches but where the cuts are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.order import Order

ORDER_BLOCK = 4096
"""Positions of one rank whose order is evaluated at once: small enough to seek in microseconds."""


class Cell(NamedTuple):
    """Positions [start, stop) relative to the batch; `weight` 0 marks a stand-in.

    Every rank runs the same number of micro-batches. One without samples runs the batch's first
    sample with weight 0, because an empty batch breaks collate functions, reshapes and means.
    """

    start: int
    stop: int
    weight: float


class Share(NamedTuple):
    """What one rank takes of one global batch: its cells, and the dataset indices of all of them.

    `first` is the position of the batch's first sample since the start of training.
    """

    first: int
    size: int
    cells: tuple[Cell, ...]
    indices: npt.NDArray[np.int64]


def cut(size: int, *, ranks: int, rank: int, micro_batches: int) -> tuple[Cell, ...]:
    """The cells of `rank` in a batch of `size` samples; sizes of cells differ by one at most."""
    total = ranks * micro_batches
    cells = []
    for number in range(rank * micro_batches, (rank + 1) * micro_batches):
        start, stop = number * size // total, (number + 1) * size // total
        cells.append(Cell(start, stop, 1.0) if stop > start else Cell(0, 1, 0.0))
    return tuple(cells)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The shares of one rank from any position on: the order cut into batches and cells.

    `size` samples in the dataset, `batch_size` in a global batch. With `drop_last` an epoch ends
    before a batch that would be short.
    """

    size: int
    batch_size: int
    ranks: int
    rank: int
    micro_batches: int
    seed: int
    shuffle: bool
    drop_last: bool

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return self.size - self.size % self.batch_size if self.drop_last else self.size

    @cached_property
    def _full(self) -> tuple[Cell, ...]:
        return self._cut(self.batch_size)

    def _cut(self, size: int) -> tuple[Cell, ...]:
        return cut(size, ranks=self.ranks, rank=self.rank, micro_batches=self.micro_batches)

    def shares(self, position: int, until: int, block: int) -> Iterator[list[Share]]:
        """The shares of the batches from `position` to `until`, in lists of up to `block`.

        A list stays within an epoch. The order is evaluated for many batches at once.
        """
        share = -(-self.batch_size // self.ranks)
        ahead = block * max(1, ORDER_BLOCK // (share * block)) * self.batch_size
        while position < until:
            epoch, offset = divmod(position, self.epoch_size)
            order = Order(self.size, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            base = epoch * self.epoch_size
            end = min(self.epoch_size, until - base)
            for start in range(offset, end, ahead):
                shares = self._block(order, base, start, min(end, start + ahead))
                for first in range(0, len(shares), block):
                    yield shares[first : first + block]
            position = base + end

    def _block(self, order: Order, base: int, offset: int, stop: int) -> list[Share]:
        starts = range(offset, stop, self.batch_size)
        sizes = [min(self.batch_size, stop - start) for start in starts]
        cut = [self._full if size == self.batch_size else self._cut(size) for size in sizes]
        positions = np.concatenate(
            [
                np.arange(start + cell.start, start + cell.stop)
                for start, cells in zip(starts, cut, strict=True)
                for cell in cells
            ]
        )
        indices = order.take(positions)
        shares, taken = [], 0
        for start, size, cells in zip(starts, sizes, cut, strict=True):
            count = sum(cell.stop - cell.start for cell in cells)
            shares.append(Share(base + start, size, cells, indices[taken : taken + count]))
            taken += count
        return shares
