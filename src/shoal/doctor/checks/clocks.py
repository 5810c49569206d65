"""How far the clocks of the hosts are apart: NTP's round trips, through the store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

from shoal.doctor.findings import CheckResult, RankFacts, failure, ok, warning, where

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TRIPS = 5
_APART = 0.1
_FAR_APART = 60.0


class Clock(TypedDict):
    """How far a rank's clock is before rank 0's in seconds, and how far off that may be."""

    offset: float
    error: float


def measure_clock_offsets(store: Store, *, rank: int, asking: Sequence[int], limit: float) -> Clock:
    """Rank 0 answers the ranks `asking`, one after the other, with its time."""
    span = timedelta(seconds=limit)
    if rank == 0:
        for other in asking:
            for trip in range(TRIPS):
                store.wait([f"asked/{other}/{trip}"], span)
                store.set(f"told/{other}/{trip}", repr(time.time()))
    elif rank in asking:
        trips = []
        for trip in range(TRIPS):
            begun, sent = time.perf_counter(), time.time()
            store.set(f"asked/{rank}/{trip}", "")
            store.wait([f"told/{rank}/{trip}"], span)
            told = float(store.get(f"told/{rank}/{trip}"))
            trips.append((sent, told, time.perf_counter() - begun))
        return estimate(trips[1:])  # the first one may have waited for other ranks' turns
    return Clock(offset=0.0, error=0.0)


def estimate(trips: Sequence[tuple[float, float, float]]) -> Clock:
    """Of round trips (own time when sent, the other's time, seconds it took) the shortest decides.

    The other's time was taken somewhere within the trip: half of it is how far off that may be. Mills,
    RFC 5905, section 8.
    """
    sent, told, taken = min(trips, key=lambda trip: trip[2])
    return Clock(offset=sent + taken / 2 - told, error=taken / 2)


def check_clocks(ranks: Sequence[RankFacts[Clock]]) -> Iterator[CheckResult]:
    """Clocks that are apart for certain: files, timelines and certificates go by them."""
    apart = [one for one in ranks if _certain(one.facts) > _APART]
    for one in apart:
        offset = one.facts["offset"]
        text = f"{where([one])} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} "
        text += f"rank 0 ({ranks[0].host})"
        fix = f"chronyc tracking (or ntpq -p, timedatectl) on {one.host}; tell the administrators"
        far = _certain(one.facts) > _FAR_APART
        yield (failure if far else warning)("clock", text, fix)
    if not apart:
        most = max(abs(one.facts["offset"]) + one.facts["error"] for one in ranks)
        yield ok("clock", f"within {1000 * most:.1f} ms of rank 0's on every host")


def _certain(clock: Clock) -> float:
    return abs(clock["offset"]) - clock["error"]
