"""A fixed binary tree of sums over virtual ranks: the same additions on any number of ranks.

Floating-point addition is not associative, so equal bits need equal parentheses. A node covers the
leaves [start, stop). Its left child has the largest power of two of leaves that leaves some to the
right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def middle_of(start: int, stop: int) -> int:
    """Return the leaf at which a node [start, stop) of at least two leaves is split."""
    return start + (1 << (stop - start - 1).bit_length() - 1)


def subtrees(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """Return the largest nodes of the tree over `total` leaves that are within [start, stop)."""
    found: list[tuple[int, int]] = []
    waiting = [(0, total)]
    while waiting:
        low, high = waiting.pop()
        if start <= low and high <= stop:
            found.append((low, high))
        elif low < stop and start < high:
            middle = middle_of(low, high)
            waiting += [(middle, high), (low, middle)]
    return found


class TreeSum(Generic[T]):
    """Sums of consecutive nodes of the tree over `total` leaves, added as soon as siblings are there.

    `nodes` has the sums so far as (start, stop, value). `add(a, b)` returns the sum of two
    siblings, and may change `a`.
    """

    def __init__(self, total: int, add: Callable[[T, T], T]) -> None:
        self.nodes: list[tuple[int, int, T]] = []
        self._add = add
        self._siblings: set[tuple[int, int, int]] = set()
        waiting = [(0, total)]
        while waiting:
            start, stop = waiting.pop()
            if stop - start > 1:
                middle = middle_of(start, stop)
                self._siblings.add((start, middle, stop))
                waiting += [(start, middle), (middle, stop)]

    def pop_sibling(self, start: int, stop: int) -> tuple[int, T] | None:
        """Remove the left sibling of the next node, [start, stop), and return its start and value."""
        if self.nodes and (self.nodes[-1][0], start, stop) in self._siblings:
            left, _, value = self.nodes.pop()
            return left, value
        return None

    def push(self, start: int, stop: int, value: T) -> None:
        """Add the next node, [start, stop)."""
        while sibling := self.pop_sibling(start, stop):
            start, left = sibling
            value = self._add(left, value)
        self.nodes.append((start, stop, value))
