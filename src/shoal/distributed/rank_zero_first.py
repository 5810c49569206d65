"""Blocks that rank 0 runs before the others, which read the outcome of each from the store."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch.distributed as dist

from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

_POLL_SECONDS = 0.05
_HEAR_SECONDS = 5.0
"""Seconds for which rank 0 waits, when it leaves, for ranks that poll for the end of its block."""


class RanksWithStore(Protocol):
    """The parts of a World that a block needs."""

    size: int

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0."""
        ...

    def store(self, prefix: str) -> Any:
        """Return the part of the ranks' common store whose keys begin with `prefix`."""
        ...


class RankZeroFirst:
    """The blocks of a world of several ranks; it counts those that all ranks enter."""

    def __init__(self, world: RanksWithStore) -> None:
        self._world = world
        self._store = world.store("shoal/first")
        self._count = 0
        self._last = ""

    @contextlib.contextmanager
    def next(self) -> Iterator[bool]:
        """Run the body on rank 0, and then on the others; see `World.rank_zero_first`."""
        self._count += 1
        with self.named(f"{self._count}") as first:
            yield first

    @contextlib.contextmanager
    def named(self, key: str, *, within: float = math.inf) -> Iterator[bool]:
        """Enter a block with its own key, which rank 0 may enter alone.

        Raises LaunchError on a rank that has waited longer than `within` seconds for rank 0.
        """
        self._last = key
        if self._world.is_rank_zero:
            try:
                yield True
            except BaseException as error:
                self._store.set(key, f"failed: {type(error).__name__}: {error}")
                raise
            self._store.set(key, "done")
            return
        until = CLOCK.now() + within
        while not self._store.check([key]):
            if CLOCK.now() > until:
                raise LaunchError(
                    given="a block of world.rank_zero_first()",
                    found=f"rank 0 has not entered it within {within:g} s",
                    fix="enter the block on rank 0 too, or on rank 0 only",
                )
            CLOCK.sleep(_POLL_SECONDS)
        outcome = self._store.get(key).decode()
        self._store.add(f"{key}/heard", 1)
        if outcome != "done":
            raise LaunchError(
                given="a block of world.rank_zero_first()",
                found=f"rank 0 {outcome}",
                fix="see rank 0's own error",
            )
        yield False

    def close(self) -> None:
        """Wait until all ranks have read how the last block ended, since rank 0 may host the store."""
        if not self._world.is_rank_zero or not dist.is_initialized():
            return
        others, until = self._world.size - 1, CLOCK.now() + _HEAR_SECONDS
        while self._store.add(f"{self._last}/heard", 0) < others and CLOCK.now() < until:
            CLOCK.sleep(_POLL_SECONDS)
