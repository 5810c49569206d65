"""Facts that differ between ranks but must not, and a short form of lists of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class RankDifference:
    """A fact that is not the same on all ranks: the usual value, and the ranks of each other one.

    `usual` is the most frequent value; among equals, that of the first rank.
    """

    name: str
    usual: str
    times: int
    others: Mapping[str, tuple[int, ...]]


def differences(ranks: Sequence[Mapping[str, str]]) -> Iterator[RankDifference]:
    """Yield the differences between ranks, each given by its facts; a missing fact is "none"."""
    for name in sorted({name for found in ranks for name in found}):
        values = [found.get(name, "none") for found in ranks]
        usual, times = Counter(values).most_common(1)[0]
        others: dict[str, tuple[int, ...]] = {}
        for rank, value in enumerate(values):
            if value != usual:
                others[value] = (*others.get(value, ()), rank)
        if others:
            yield RankDifference(name=name, usual=usual, times=times, others=others)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in a short form, such as `0-3,8`."""
    parts = []
    ordered = sorted(numbers)
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}")
    return ",".join(parts)
