"""Continuation of a world without ranks that have ended, if the strategy allows it.

Before each collective of a world, the ranks join a rendezvous through its store, which waits for live
ranks only. The first rank that finds all of them present decides who takes part, and its decision
holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from shoal.distributed.watchdog.abort import may_die_alone
from shoal.distributed.watchdog.world_watchdog import Watchdog
from shoal.util.clock import CLOCK
from shoal.util.differences import spans
from shoal.util.errors import LaunchError

LOOK_SECONDS = 0.5
"""Shortest time in seconds between two checks whether missing ranks are alive."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class EndedRanksFinder(Protocol):
    """A function that finds the ranks that have ended."""

    def __call__(self, ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
        """Return those of `ranks` that have ended; with `unreachable`, or that can't be reached."""


class Survivors:
    """The `members` of a world: the ranks, by their original numbers, alive at the last rendezvous.

    `gone` returns which of some ranks have ended. A rank that is only silent is waited for, and one
    whose machine can't be reached for as long as a wait may last. `rank` is this rank's original
    number. The rendezvous uses `store`.
    """

    def __init__(self, store: Store, *, rank: int, size: int, gone: EndedRanksFinder) -> None:
        self.members = list(range(size))
        self.rank = rank
        self.store = store
        self.gone = gone
        self._meetings = 0

    def meet(self, limit: float) -> list[int]:
        """Wait until each member has joined or has ended, and return those that ended since.
        Collective.

        Raises LaunchError if a live member does not join within `limit` seconds, if the others have
        left this rank out, or if the store is gone, with rank 0 or the launcher.
        """
        try:
            here = self._meet(limit)
        except RuntimeError as error:
            raise LaunchError(
                given="ranks that continue without those that have ended",
                found="the store of their rendezvous can't be reached any more: "
                f"{str(error).splitlines()[0]}",
                fix="see the error of rank 0, which hosts the store unless `shoal run` does; the same "
                "command resumes from the latest complete checkpoint",
            ) from None
        if self.rank not in here:
            raise LaunchError(
                given=f"rank {self.rank}, which rejoins the other ranks",
                found="they could not reach its machine, and have continued without it",
                fix="check the network; when the other ranks have ended, run the same command again: "
                "it resumes from the latest complete checkpoint",
            )
        lost = [member for member in self.members if member not in here]
        self.members = here
        return lost

    def _meet(self, limit: float) -> list[int]:
        self._meetings += 1
        keys = {member: f"{self._meetings}/{member}" for member in self.members}
        decided = f"{self._meetings}/here"
        self.store.set(keys[self.rank], "")
        last = self.store.add(f"{self._meetings}/came", 1) == len(keys)
        pause, looked, until = _FIRST_PAUSE, CLOCK.now(), CLOCK.now() + limit
        while not self.store.check([decided]):
            late = CLOCK.now() >= until
            # The last one to join decides at once; the others decide only if it may never join.
            if last or late or CLOCK.now() >= looked + LOOK_SECONDS:
                # Also those that have joined: they may have ended while they waited.
                others = [member for member in keys if member != self.rank]
                ended = self.gone(others, unreachable=late)
                living = [member for member in keys if member not in ended]
                missing = [member for member in living if not self.store.check([keys[member]])]
                if not missing:
                    self.store.compare_set(decided, "", json.dumps(living))
                    break
                if late:
                    raise LaunchError(
                        given=f"a rendezvous that took more than {limit:g} s",
                        found=f"rank {spans(missing)} is alive and did not join",
                        fix="find out what delays it; if it may take that long, use "
                        "shoal.init(timeout=…)",
                    )
                last, looked = False, CLOCK.now()
            CLOCK.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        here: list[int] = json.loads(self.store.get(decided))
        return here


class Membership:
    """The ranks that take part in a world: all of them or, after `survive`, those that are alive.

    `survivors` is None until then. If ranks are lost, `renumber` is called with the remaining members
    and the lost ones, before the next collective. `store` returns a part of the ranks' common store.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        rank: int,
        size: int,
        renumber: Callable[[Sequence[int], Sequence[int]], None],
        store: Callable[[str], Store],
    ) -> None:
        self.survivors: Survivors | None = None
        self._watchdog = watchdog
        self._store = store
        self._rank, self._size = rank, size
        self._renumber = renumber

    def survive(self, *, essential: bool = False) -> None:
        """Continue without ranks that end, from now on. Collective.

        It is for strategies whose steps need no other rank. If a rank that is not `essential` is
        killed, `shoal run` lets the others continue.
        """
        if not self._watchdog.active or self.survivors is not None:
            return
        self._watchdog.stop_comparing()
        store = self._store("shoal/survivors")
        self.survivors = Survivors(store, rank=self._rank, size=self._size, gone=self._watchdog.gone)
        self.meet()
        if not essential:
            may_die_alone()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for the live ranks, if ranks may be lost, before the collective of a block.

        Raises LaunchError with the rank that has ended if another one ends in the block.
        """
        self.meet()
        with self.explained():
            yield

    def explained(self, during: str = "") -> AbstractContextManager[None]:
        """Do the same without the wait; see Watchdog."""
        return self._watchdog.explained(during)

    def meet(self) -> None:
        """Wait for the live ranks, if ranks may be lost. Each collective begins with it."""
        if self.survivors is None:
            return
        lost = self.survivors.meet(self._watchdog.limit)
        if lost:
            self._renumber(self.survivors.members, lost)
