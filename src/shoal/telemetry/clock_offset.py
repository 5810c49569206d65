"""The offsets of the ranks' clocks from rank 0's, by round trips (Cristian 1989; NTP)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

TRIPS = 10
_PATIENCE = timedelta(seconds=20)
"""How long a rank waits for another one to reach the same step."""


class RoundTrip(NamedTuple):
    """Times in ns at which a request was sent, the other clock replied, and the reply arrived."""

    sent: int
    answered: int
    received: int


class ClockOffset(NamedTuple):
    """The nanoseconds to add to this rank's clock to get rank 0's, measured at its own time `at`."""

    at: int
    offset: int
    uncertainty: int


def best_offset(trips: Sequence[RoundTrip]) -> ClockOffset:
    """Return the offset by the quickest trip. Half of its duration is the uncertainty."""
    trip = min(trips, key=lambda trip: trip.received - trip.sent)
    middle = (trip.sent + trip.received) // 2
    return ClockOffset(trip.sent, trip.answered - middle, (trip.received - trip.sent + 1) // 2)


def offset_at(offsets: Sequence[ClockOffset], time: float) -> float:
    """Return the offset at a time, on the line through the first and the last measurement."""
    first, last = offsets[0], offsets[-1]
    if last.at <= first.at:
        return float(first.offset)
    return first.offset + (last.offset - first.offset) * (time - first.at) / (last.at - first.at)


def measure_offset(store: Store, rank: int, size: int, clock: Callable[[], int]) -> ClockOffset | None:
    """Return this rank's offset, by several trips through the store; all ranks return together.

    Returns None if another rank did not take part.
    """
    from torch.distributed import DistStoreError

    try:
        if rank:
            found = ask_offset(store, rank, clock, _PATIENCE)
            store.wait(["done"], _PATIENCE * size)
            return found
        answer_trips(store, range(1, size), clock, _PATIENCE)
        store.set("done", "")
    except DistStoreError:
        return None
    return ClockOffset(clock(), 0, 0)


def answer_trips(
    store: Store, ranks: Iterable[int], clock: Callable[[], int], limit: timedelta
) -> None:
    """Send the time of this rank's clock to `ranks`, one after the other.

    Raises DistStoreError if a rank does not ask within the limit.
    """
    for rank in ranks:
        for trip in range(TRIPS):
            store.wait([f"{rank}/{trip}/asked"], limit)
            store.set(f"{rank}/{trip}/answer", str(clock()))


def ask_offset(store: Store, rank: int, clock: Callable[[], int], limit: timedelta) -> ClockOffset:
    """Return the offset of this rank's clock from that of the rank that answers.

    Raises DistStoreError if no answer arrives within the limit.
    """
    return best_offset([_ask(store, f"{rank}/{trip}", clock, limit) for trip in range(TRIPS)])


def _ask(store: Store, key: str, clock: Callable[[], int], limit: timedelta) -> RoundTrip:
    sent = clock()
    store.set(f"{key}/asked", "")
    store.wait([f"{key}/answer"], limit)
    received = clock()
    return RoundTrip(sent, int(store.get(f"{key}/answer")), received)
