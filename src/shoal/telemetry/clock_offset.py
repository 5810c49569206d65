"""How far the clocks of the ranks are apart, by asking rank 0 for the time (Cristian 1989; NTP)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TRIPS = 10
_PATIENCE = timedelta(seconds=20)
"""How long a rank waits for another one to come to the same step."""


class Trip(NamedTuple):
    """When a question was sent, what the other clock said, when that came back; in ns."""

    sent: int
    answered: int
    received: int


class Offset(NamedTuple):
    """What is to be added to this rank's clock to give rank 0's, at `at` by its own; in ns."""

    at: int
    offset: int
    uncertainty: int


def best(trips: Sequence[Trip]) -> Offset:
    """The offset by the quickest trip. The answer lies within it, so half of it is the uncertainty."""
    trip = min(trips, key=lambda trip: trip.received - trip.sent)
    middle = (trip.sent + trip.received) // 2
    return Offset(trip.sent, trip.answered - middle, (trip.received - trip.sent + 1) // 2)


def at(offsets: Sequence[Offset], time: float) -> float:
    """The offset at a time, on the line through the first and the last that were measured."""
    first, last = offsets[0], offsets[-1]
    if last.at <= first.at:
        return float(first.offset)
    return first.offset + (last.offset - first.offset) * (time - first.at) / (last.at - first.at)


def compare(store: Store, rank: int, size: int, clock: Callable[[], int]) -> Offset | None:
    """This rank's offset, by several trips through the store; all ranks call it, and leave it together.

    None where another rank did not come.
    """
    from torch.distributed import DistStoreError

    try:
        if rank:
            found = best([_ask(store, f"{rank}/{trip}", clock) for trip in range(TRIPS)])
            store.wait(["done"], _PATIENCE * size)
            return found
        for other in range(1, size):
            for trip in range(TRIPS):
                store.wait([f"{other}/{trip}/asked"], _PATIENCE)
                store.set(f"{other}/{trip}/answer", str(clock()))
        store.set("done", "")
    except DistStoreError:
        return None
    return Offset(clock(), 0, 0)


def _ask(store: Store, key: str, clock: Callable[[], int]) -> Trip:
    sent = clock()
    store.set(f"{key}/asked", "")
    store.wait([f"{key}/answer"], _PATIENCE)
    received = clock()
    return Trip(sent, int(store.get(f"{key}/answer")), received)
