"""The shortest part of a list that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of `items` that fails, and does not without any one of its items.

    Halves are tried first, then smaller parts (Zeller and Hildebrandt, Simplifying and Isolating
    Failure-Inducing Input, 2002). Each part is tried once.
    """
    left = list(items)
    size = len(left) // 2
    while size >= 1:
        start = 0
        while start < len(left) and len(left) > 1:
            rest = left[:start] + left[start + size :]
            if rest and fails(rest):
                left = rest
            else:
                start += size
        size //= 2
    return left
