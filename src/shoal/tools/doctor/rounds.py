"""Rounds in which the ranks of a job exchange results, so that no rank waits forever for another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from shoal.util.clock import CLOCK, start_work
from shoal.util.errors import LaunchError, ShoalError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class TimedOutcome(TypedDict):
    """The outcome of work: a value that JSON holds, or the error; `hung` if it is still running."""

    value: Any
    trouble: str
    hung: bool


def run_together(works: Mapping[str, Callable[[], object]], limit: float) -> dict[str, TimedOutcome]:
    """Run all of `works` at once, and return their outcomes within `limit` seconds."""
    futures = {name: start_work(work) for name, work in works.items()}
    done, _ = wait(futures.values(), timeout=limit)
    late = TimedOutcome(value=None, trouble=f"not finished within {limit:g} s", hung=True)
    return {name: _outcome(each) if each in done else late for name, each in futures.items()}


def _outcome(done: Future[object]) -> TimedOutcome:
    error = done.exception()
    if error is None:
        return TimedOutcome(value=done.result(), trouble="", hung=False)
    if isinstance(error, ShoalError):
        return TimedOutcome(value=None, trouble=f"{error.found}; {error.fix}", hung=False)
    # Any error of a rank is a line of the report.
    first = (str(error).splitlines() or [""])[0]
    trouble = f"{type(error).__name__}: {first}".rstrip(": ")
    return TimedOutcome(value=None, trouble=trouble, hung=False)


T = TypeVar("T")

_POLL_SECONDS = 0.01
_LATE_SECONDS = 5.0
"""Additional seconds for other ranks to end a round, since they may have begun it later than rank 0."""


class Rounds:
    """Rounds in which rank 0 collects the results of all; a rank that is late is missing for good.

    The exchange uses a store and not collectives, in which one rank that hangs would block all others.
    Without a store it is a world of one.
    """

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self.store = store
        self.rank, self.size = rank, size
        self.missing: tuple[int, ...] = ()
        self.stuck = False
        """Whether a rank hangs in joint work."""

    @property
    def going(self) -> bool:
        """Whether all ranks are here, so that joint work can start. The same on every rank."""
        return not self.missing and not self.stuck

    def take(
        self,
        name: str,
        works: Mapping[str, Callable[[], object]],
        limit: float,
        *,
        together: bool = False,
    ) -> list[dict[str, TimedOutcome]]:
        """Return the results of `works` on each rank, in rank order; empty for a missing rank.

        On other ranks than 0 the list is empty. If `together` and one rank hangs, the others wait for
        it. So no other work is started after that.
        """
        deadline = CLOCK.now() + limit + _LATE_SECONDS
        mine = run_together(works, limit)
        if self.store is None:
            everyone = [mine]
        elif self.rank:
            self.store.set(f"{name}/{self.rank}", json.dumps(mine))
            missing, self.stuck = self._hear(self.store, f"{name}/all", limit + 2 * _LATE_SECONDS)
            self.missing = tuple(missing)
            return []
        else:
            everyone = self._collect(self.store, name, mine, deadline)
        hung = any(one["hung"] for outcomes in everyone for one in outcomes.values())
        self.stuck = self.stuck or (together and hung)
        if self.store is not None:
            self.store.set(f"{name}/all", json.dumps([self.missing, self.stuck]))
        return everyone

    def _collect(
        self, store: Store, name: str, mine: dict[str, TimedOutcome], deadline: float
    ) -> list[dict[str, TimedOutcome]]:
        found: dict[int, dict[str, TimedOutcome]] = {0: mine}
        awaited = [rank for rank in range(1, self.size) if rank not in self.missing]
        while awaited:
            here = [rank for rank in awaited if store.check([f"{name}/{rank}"])]
            found |= {rank: json.loads(store.get(f"{name}/{rank}")) for rank in here}
            awaited = [rank for rank in awaited if rank not in found]
            if CLOCK.now() > deadline:
                break
            if not here:
                CLOCK.sleep(_POLL_SECONDS)
        self.missing = tuple(sorted({*self.missing, *awaited}))
        return [found.get(rank, {}) for rank in range(self.size)]

    def _hear(self, store: Store, key: str, limit: float) -> Any:
        try:
            store.wait([key], timedelta(seconds=limit))
            return json.loads(store.get(key))
        except RuntimeError:
            raise LaunchError(
                given=f"rank {self.rank} of {self.size} in shoal doctor, at {key}",
                found=f"rank 0 did not continue within {limit:.0f} s, or has ended",
                fix="read the output of rank 0",
            ) from None

    def tell(self, name: str, value: T) -> T:
        """Return rank 0's value on every rank; a value that JSON can hold."""
        if self.store is None:
            return value
        if self.rank == 0:
            self.store.set(f"{name}/told", json.dumps(value))
            return value
        told: T = self._hear(self.store, f"{name}/told", 2 * _LATE_SECONDS)
        return told

    def end(self) -> None:
        """Keep rank 0, which may hold the store, until all present ranks have its last message."""
        if self.store is None:
            return
        if self.rank:
            self.store.set(f"heard/{self.rank}", "")
            return
        heard = [f"heard/{rank}" for rank in range(1, self.size) if rank not in self.missing]
        with suppress(RuntimeError):
            self.store.wait(heard, timedelta(seconds=_LATE_SECONDS))
