"""Orders, position to sample index: shuffled, drawn by weight, or from a torch Sampler."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, WeightedRandomSampler

from shoal.data.permutation import Permutation
from shoal.util.arguments import check_integer
from shoal.util.errors import DataError

Indices = npt.NDArray[np.int64]

PROBES = 16


class SampleOrder(Protocol):
    """The sample at each position of each epoch, as a function of (seed, epoch, position) alone.

    Then nothing has to be replayed to resume, and the number of ranks can't matter.
    """

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices (int64) at `positions` (0 to the length) of an epoch (from 0)."""
        ...


class Shuffled:
    """Every sample once in an epoch: in the order of `Permutation`, or in the dataset's order."""

    def __init__(self, size: int, *, shuffle: bool) -> None:
        self._size = size
        self._shuffle = shuffle
        self._order: Permutation | None = None

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices at `positions`."""
        order = self._order
        if order is None or (order.seed, order.epoch) != (seed, epoch):
            order = Permutation(self._size, seed=seed, epoch=epoch, shuffle=self._shuffle)
            self._order = order
        return order.take(positions)


class WeightedSampling:
    """Samples drawn with replacement, each with a probability proportional to its weight.

    Pass one as the `order` of a Loader. The draw at a position depends only on (seed, epoch, position):
    SplitMix64 (Steele et al. 2014) makes a random number from this counter, and the inverse of the
    distribution function maps it to a sample.

    Args:
        weights: One finite number, 0 or more, per sample of the dataset; not all of them 0.
        size: Number of draws in an epoch, 1 or more. `None` takes the number of weights. Default: None.

    Raises:
        DataError: If the weights or the size are out of range.

    Examples:
        >>> order = shoal.WeightedSampling([1.0, 0.0, 3.0], size=1000)
        >>> drawn = order.take(np.arange(1000), seed=0, epoch=0)
        >>> sorted(set(drawn.tolist()))
        [0, 2]
    """

    def __init__(self, weights: npt.ArrayLike, *, size: int | None = None) -> None:
        table = np.asarray(weights, dtype=np.float64)
        if table.ndim != 1 or not np.isfinite(table).all() or (table < 0).any() or not table.any():
            raise DataError(
                given=f"WeightedSampling(weights) of shape {table.shape}",
                found="weights are one finite number >= 0 per sample, and not all 0",
                fix="pass one weight per sample, for example 1 / count[label] for each label",
            )
        if size is not None:
            check_integer(DataError, "WeightedSampling", "size", size, 1, usual=len(table))
        self.samples = len(table)
        self._size = self.samples if size is None else int(size)
        # Scaling by a power of two is exact. Unscaled sums could overflow or underflow.
        self._sums = np.cumsum(np.ldexp(table, -np.frexp(table.max())[1]))
        self._last = int(np.flatnonzero(table)[-1])  # rounding must not draw a weight of 0 after it

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices at `positions`.

        Args:
            positions: int64 array of shape (n,), from 0 to the number of draws.
            seed: Seed of the order, any integer.
            epoch: Number of the epoch, from 0.

        Returns:
            An int64 array of shape (n,).
        """
        wanted = uniform(positions, seed=seed, epoch=epoch) * self._sums[-1]
        found = np.searchsorted(self._sums, wanted, side="right")
        indices: Indices = np.minimum(found, self._last).astype(np.int64)
        return indices


def uniform(positions: Indices, *, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """Return a uniform number in [0, 1) for each position, by SplitMix64 keyed with (seed, epoch)."""
    digest = hashlib.sha256(f"shoal.Weighted/1 seed={seed} epoch={epoch}".encode()).digest()
    key = np.uint64(int.from_bytes(digest[:8], "little"))
    word = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return (word >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


class SamplerOrder:
    """A torch Sampler, listed once per epoch; DataError unless the list depends only on the epoch."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self._sampler = sampler
        _refuse_known(sampler)
        self._listed = 0, self._list(0)
        if not np.array_equal(self._list(0), self._listed[1]):
            raise DataError(
                given=f"Loader(order={type(sampler).__name__})",
                found="it lists different indices each time, so ranks and resumed runs would differ",
                fix="use shuffle=True without order, which shuffles by (seed, epoch); or let the "
                "sampler define set_epoch(epoch), and seed its generator from the epoch in __iter__",
            )

    def __len__(self) -> int:
        return len(self._listed[1])

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices at `positions`; the sampler has its own seed."""
        if epoch != self._listed[0]:
            listed = self._list(epoch)
            if len(listed) != len(self):
                raise DataError(
                    given=f"Loader(order={type(self._sampler).__name__})",
                    found=f"it lists {len(self):,} indices in one epoch and {len(listed):,} in epoch "
                    f"{epoch}, so that positions have no fixed meaning",
                    fix="use a sampler whose length is the same in every epoch, or "
                    "shoal.WeightedSampling(weights, size=…)",
                )
            self._listed = epoch, listed
        taken: Indices = self._listed[1][positions]
        return taken

    def _list(self, epoch: int) -> Indices:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return np.fromiter(self._sampler, dtype=np.int64)


def _refuse_known(sampler: Sampler[Any]) -> None:
    if isinstance(sampler, DistributedSampler):
        found, fix = (
            "the Loader itself splits the batches over ranks",
            "leave order out, or shuffle=True",
        )
    elif isinstance(sampler, WeightedRandomSampler):
        found = "it draws from a generator, and a position does not determine its state"
        fix = "order=shoal.WeightedSampling(weights)"
    elif isinstance(sampler, BatchSampler):
        found = "it yields batches; batch_size is a separate option"
        fix = (
            "use order=sampler.sampler with batch_size=512, or batch_size=shoal.TokenBudget(lengths, "
            "8192)"
        )
    else:
        return
    raise DataError(given=f"Loader(order={type(sampler).__name__})", found=found, fix=fix)


def ordering(order: Any, size: int) -> SampleOrder:
    """Return the user's `order` of a dataset of `size` samples, checked as far as possible."""
    if isinstance(order, Sampler):
        order = SamplerOrder(order)
    if not hasattr(order, "take") or not hasattr(order, "__len__") or isinstance(order, Permutation):
        raise DataError(
            given=f"Loader(order={type(order).__name__})",
            found="it has no method that returns the sample at (seed, epoch, position)",
            fix="pass shoal.WeightedSampling(weights), a torch Sampler, or an object with __len__() "
            "and take(positions, *, seed, epoch) -> indices",
        )
    if getattr(order, "samples", size) != size:
        raise DataError(
            given=f"WeightedSampling({order.samples:,} weights)",
            found=f"a dataset of {size:,} samples",
            fix="pass one weight per sample: print(len(weights), len(dataset))",
        )
    found: SampleOrder = order
    return CheckedOrder(found, size)


class CheckedOrder:
    """A custom order whose indices are checked before they are used."""

    def __init__(self, order: SampleOrder, size: int) -> None:
        self._order = order
        self._samples = size
        self._size = len(order)

    def __len__(self) -> int:
        return self._size

    def take(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Return the sample indices at `positions`; raises DataError for an index out of range."""
        indices = np.asarray(self._order.take(positions, seed=seed, epoch=epoch))
        shaped = indices.shape == positions.shape and indices.dtype.kind in "iu"
        if not shaped or (len(indices) and not 0 <= indices.min() <= indices.max() < self._samples):
            raise DataError(
                given=f"Loader(order={type(self._order).__name__}): take({len(positions)} positions, "
                f"epoch={epoch})",
                found=f"an array of shape {indices.shape}, dtype {indices.dtype}, "
                + (f"from {indices.min()} to {indices.max()}" if shaped else "not of indices"),
                fix=f"return one integer from 0 to {self._samples - 1} per position",
            )
        return indices.astype(np.int64)

    def fingerprint(self, seed: int) -> int:
        """Return a checksum over a few positions of two epochs, which identifies the order."""
        probes = np.unique(np.linspace(0, self._size - 1, PROBES).astype(np.int64))
        taken = [self.take(probes, seed=seed, epoch=epoch) for epoch in (0, 1)]
        return zlib.crc32(np.concatenate(taken).astype("<i8").tobytes())
