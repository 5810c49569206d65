"""What the ranks of a job do together, round by round, so that none waits for another for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.doctor.time_limit import TimedOutcome, beside
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")

_POLL_SECONDS = 0.01
_LATE_SECONDS = 5.0
"""How much later than rank 0 others may end a round: they may have begun it later."""


class Rounds:
    """Rank 0 collects what came of a round from all; who has not come by then is missing for good.

    The exchange goes through a store and not through collectives, in which one that hangs would keep
    all others. Without a store it is a world of one.
    """

    def __init__(self, store: Store | None, *, rank: int, size: int) -> None:
        self.store = store
        self.rank, self.size = rank, size
        self.missing: tuple[int, ...] = ()
        self.stuck = False
        """Whether a rank hangs in what all did together."""

    @property
    def going(self) -> bool:
        """Whether all ranks are here, so that what needs all can be begun. The same on every rank."""
        return not self.missing and not self.stuck

    def take(
        self,
        name: str,
        works: Mapping[str, Callable[[], object]],
        limit: float,
        *,
        together: bool = False,
    ) -> list[dict[str, TimedOutcome]]:
        """What came of `works` on each rank, in rank order, with nothing of one that is missing.

        On other ranks than 0 the list is empty. What is done `together` keeps others waiting where it
        hangs on one; so after that nothing else is begun.
        """
        deadline = time.monotonic() + limit + _LATE_SECONDS
        mine = beside(works, limit)
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
            if time.monotonic() > deadline:
                break
            if not here:
                time.sleep(_POLL_SECONDS)
        self.missing = tuple(sorted({*self.missing, *awaited}))
        return [found.get(rank, {}) for rank in range(self.size)]

    def _hear(self, store: Store, key: str, limit: float) -> Any:
        try:
            store.wait([key], timedelta(seconds=limit))
            return json.loads(store.get(key))
        except RuntimeError:
            raise LaunchError(
                given=f"rank {self.rank} of {self.size} in shoal doctor, at {key}",
                found=f"rank 0 did not go on within {limit:.0f} s, or is gone",
                fix="see what rank 0 itself has printed",
            ) from None

    def tell(self, name: str, value: T) -> T:
        """What rank 0 has to say, on every rank; a value that JSON holds."""
        if self.store is None:
            return value
        if self.rank == 0:
            self.store.set(f"{name}/told", json.dumps(value))
            return value
        told: T = self._hear(self.store, f"{name}/told", 2 * _LATE_SECONDS)
        return told

    def end(self) -> None:
        """Rank 0, which may hold the store, stays until all that are here have heard its last word."""
        if self.store is None:
            return
        if self.rank:
            self.store.set(f"heard/{self.rank}", "")
            return
        heard = [f"heard/{rank}" for rank in range(1, self.size) if rank not in self.missing]
        with suppress(RuntimeError):
            self.store.wait(heard, timedelta(seconds=_LATE_SECONDS))
