"""Facts that differ between ranks but must not, and a short form of lists of ranks."""

from __future__ import annotations

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


def minority(values: Sequence[object]) -> tuple[int, list[int]]:
    """Return the first rank with the most frequent value, and the ranks with other values.

    Among values that are equally frequent, that of the lowest rank is taken.
    """
    if all(value == values[0] for value in values):
        return 0, []
    counts = [sum(other == value for other in values) for value in values]
    usual = counts.index(max(counts))
    return usual, [rank for rank, value in enumerate(values) if value != values[usual]]


def and_more(ranks: Sequence[int]) -> str:
    """Return the end of a sentence about the first of `ranks`, which says how many others there are."""
    return f", and {len(ranks) - 1} more ranks differ" if len(ranks) > 1 else ""


def differences(ranks: Sequence[Mapping[str, str]]) -> Iterator[RankDifference]:
    """Yield the differences between ranks, each given by its facts; a missing fact is "none"."""
    for name in sorted({name for found in ranks for name in found}):
        values = [found.get(name, "none") for found in ranks]
        usual, odd = minority(values)
        others: dict[str, tuple[int, ...]] = {}
        for rank in odd:
            others[values[rank]] = (*others.get(values[rank], ()), rank)
        if others:
            times = len(values) - len(odd)
            yield RankDifference(name=name, usual=values[usual], times=times, others=others)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in a short form, such as `0-3,8`."""
    parts = []
    ordered = sorted(numbers)
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else f"{found[0]}")
    return ",".join(parts)
