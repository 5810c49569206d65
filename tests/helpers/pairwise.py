"""A few rows of a long table that stand for all: each pair of values that occurs is among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)


def cover(rows: Sequence[Row], values: Callable[[Row], Sequence[Hashable]]) -> set[Row]:
    """Rows, chosen greedily, in which each pair of `values` occurs that occurs in any of `rows`."""
    pairs = {row: set(itertools.combinations(enumerate(values(row)), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen: set[Row] = set()
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs[row]))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
