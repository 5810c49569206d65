"""Groups of consecutive positions of a batch, over which layers such as BatchNorm take statistics.

Pure arithmetic: which samples of a global batch each micro-batch of each rank has, which groups these
samples belong to, and which ranks have samples of one group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.data.micro import Place


def piece(place: Place, *, ranks: int, rank: int) -> tuple[int, int]:
    """Return the positions [start, stop) in the batch of a rank's part of a micro-batch.

    With at least as many units as ranks, ranks are cut at multiples of the unit too, so that no two
    ranks have samples of one unit. With fewer, and equal proportions, sizes differ by at most one.
    """
    size, number, micro_batches, unit, _, proportions = place
    shares = proportions or (1,) * ranks
    total, before, own = sum(shares), sum(shares[:rank]), shares[rank]
    if unit is None:
        cell, cells = before * micro_batches + number * own, total * micro_batches
        return cell * size // cells, (cell + own) * size // cells
    units = -(-size // unit)
    first, last = (each * units // micro_batches for each in (number, number + 1))
    if last - first >= ranks:
        cuts = [(first + each * (last - first) // total) * unit for each in (before, before + own)]
    else:
        start, stop = first * unit, min(size, last * unit)
        cuts = [start + each * (stop - start) // total for each in (before, before + own)]
    return min(size, cuts[0]), min(size, cuts[1])


class HeldGroup(NamedTuple):
    """The samples of one group that a rank has, [start, stop) of its part of the micro-batch.

    A rank without samples has none of the first group of the micro-batch. The rank that `leads` has
    the first sample of the group.
    """

    group: int
    start: int
    stop: int
    leads: bool


class MicroGroups(NamedTuple):
    """The groups of a micro-batch: [first, last) of the `total` groups of the batch.

    `held` has the groups of each rank, in order. They are `shared` if several ranks exchange sums.
    `least` is the size of the smallest of them. Groups of a batch have `size` samples, except the last.
    """

    first: int
    last: int
    total: int
    held: tuple[tuple[HeldGroup, ...], ...]
    shared: bool
    least: int


@lru_cache(maxsize=64)
def groups_of(place: Place, *, ranks: int, size: int | None) -> MicroGroups:
    """Return the groups of `size` samples in a micro-batch; None is one group, the complete batch."""
    parts = [piece(place, ranks=ranks, rank=rank) for rank in range(ranks)]
    start, stop = parts[0][0], parts[-1][1]
    length = size or place.size
    first, last = start // length, -(-stop // length)
    held = tuple(
        tuple(
            HeldGroup(
                group,
                max(begin, group * length) - begin,
                min(end, (group + 1) * length) - begin,
                leads=begin <= group * length,
            )
            for group in range(begin // length, -(-end // length))
        )
        if end > begin
        else ((HeldGroup(first, 0, 0, leads=False),) if stop > start else ())
        for begin, end in parts
    )
    holders = [each.group for groups in held for each in groups]
    least = min((min(stop, (g + 1) * length) - g * length for g in range(first, last)), default=0)
    return MicroGroups(
        first, last, -(-place.size // length), held, len(set(holders)) < len(holders), least
    )
