"""Ranks that have ended are left out of what the others do together, where a strategy allows that.

Before each collective of a world the ranks meet through its store, which waits for those that live and
for no others. Whoever finds first that all of them are there says who takes part; what it says holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shoal._torch import c10d
from shoal.distributed.watchdog.abort import may_die_alone
from shoal.distributed.watchdog.world_watchdog import Watchdog
from shoal.util.differences import spans
from shoal.util.errors import LaunchError

LOOK_SECONDS = 0.5
"""How often, at most, ranks that did not come are asked whether they live."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class Gone(Protocol):
    """What tells which ranks have ended."""

    def __call__(self, ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
        """Those of `ranks` that have ended; if `unreachable`, also those that can't be reached."""


class Survivors:
    """The `members` of a world: the ranks, by their first numbers, that lived when they met last.

    `gone` gives those of some ranks that have ended; one that is only silent is waited for, and one
    whose machine can't be reached for as long as a wait may last. `rank` is this one's first number;
    they meet in `store`.
    """

    def __init__(self, store: Store, *, rank: int, size: int, gone: Gone) -> None:
        self.members = list(range(size))
        self.rank = rank
        self.store = store
        self.gone = gone
        self._meetings = 0

    def meet(self, limit: float) -> list[int]:
        """Wait until each member has come or has ended; those that have ended since. Collective.

        Raises LaunchError where one that lives does not come within `limit` seconds, where the others
        have left this one out, or where the store is gone, with rank 0 or the launcher.
        """
        try:
            here = self._meet(limit)
        except RuntimeError as error:
            raise LaunchError(
                given="ranks that go on without those which have ended",
                found="they meet through a store that can't be reached any more: "
                f"{str(error).splitlines()[0]}",
                fix="see rank 0's own error, which keeps the store unless `shoal run` does; the same "
                "command goes on from the newest checkpoint",
            ) from None
        if self.rank not in here:
            raise LaunchError(
                given=f"rank {self.rank}, which meets the others again",
                found="they could not reach its machine, and have gone on without it",
                fix="see the network; the same command, when they are done, goes on from the newest "
                "checkpoint",
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
        pause, looked, until = _FIRST_PAUSE, time.monotonic(), time.monotonic() + limit
        while not self.store.check([decided]):
            late = time.monotonic() >= until
            # The last one to come decides at once; the others only where it may never come.
            if last or late or time.monotonic() >= looked + LOOK_SECONDS:
                # Also those that have come: they may have ended while they waited.
                others = [member for member in keys if member != self.rank]
                ended = self.gone(others, unreachable=late)
                living = [member for member in keys if member not in ended]
                missing = [member for member in living if not self.store.check([keys[member]])]
                if not missing:
                    self.store.compare_set(decided, "", json.dumps(living))
                    break
                if late:
                    raise LaunchError(
                        given=f"a wait of more than {limit:g} s for ranks to meet",
                        found=f"rank {spans(missing)} lives and did not come",
                        fix="see what keeps it; if it may take so long, shoal.init(timeout=…)",
                    )
                last, looked = False, time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        here: list[int] = json.loads(self.store.get(decided))
        return here


class Membership:
    """Which ranks take part in a world: all of them or, after `survive`, those that live.

    `survivors` is None until then. Where ranks are lost, `renumber` is called with the members that
    remain and with the lost ones, before the next collective.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        *,
        rank: int,
        size: int,
        renumber: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.survivors: Survivors | None = None
        self._watchdog = watchdog
        self._rank, self._size = rank, size
        self._renumber = renumber

    def survive(self, *, essential: bool = False) -> None:
        """Continue without ranks that end, from now on. Collective.

        For strategies whose steps need no other rank. If a rank that is not `essential` is killed,
        `shoal run` lets the others continue.
        """
        if not self._watchdog.active or self.survivors is not None:
            return
        self._watchdog.stop_comparing()
        store = PrefixStore("shoal/survivors", c10d.default_store())
        self.survivors = Survivors(store, rank=self._rank, size=self._size, gone=self._watchdog.gone)
        self.meet()
        if not essential:
            may_die_alone()

    def meet(self) -> None:
        """Wait for the ranks that live, if ranks may be lost. Each collective begins with it."""
        if self.survivors is None:
            return
        lost = self.survivors.meet(self._watchdog.limit)
        if lost:
            self._renumber(self.survivors.members, lost)
