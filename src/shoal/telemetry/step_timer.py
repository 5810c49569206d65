"""Where a rank's time goes. At each moment it belongs to one part, from one mark to the next.

Loader, step, engines, saves and evaluation mark what begins. A mark ends the part before, so parts are
disjoint and add up to all the time there was, whatever was marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

PARTS = (
    "other",
    "wait",
    "transfer",
    "forward",
    "backward",
    "communication",
    "update",
    "checkpoint",
    "evaluation",
)
"""What time is spent on; `other` is what nobody marked, the script's own."""
(
    OTHER,
    WAIT,
    TRANSFER,
    FORWARD,
    BACKWARD,
    COMMUNICATION,
    UPDATE,
    CHECKPOINT,
    EVALUATION,
) = range(1, 1 + len(PARTS))
CLOCK = 0

Spent: TypeAlias = tuple[int, ...]
"""What a clock showed, then how much has been spent on each of PARTS until then; nanoseconds."""

UNRESOLVED = 256
"""So many marks on a device are kept before it is asked how far it is."""


class Timeline:
    """The parts of one rank's time, by the clock of the host.

    `spent` is a clock, then nanoseconds by part, only ever more of them. It is one list of integers,
    since a mark is made some eight times in a step.
    """

    hosts = True
    """Whether `take` goes by the clock of the host, as `spent` does."""

    def __init__(self) -> None:
        self.spent = [perf_counter_ns(), *(0 for _ in PARTS)]
        self._part = OTHER
        self._held = False
        self._paused: Spent | None = self.take()

    def enter(self, part: int) -> int:
        """From now on time belongs to `part`. Returns the part before, to enter that again."""
        if self._held:
            return part
        spent, before = self.spent, self._part
        now = perf_counter_ns()
        spent[before] += now - spent[CLOCK]
        spent[CLOCK] = now
        self._part = part
        return before

    def within(self, part: int) -> Within:
        """Enter `part`, and afterwards the part before."""
        return Within(self, part)

    @contextmanager
    def during(self, part: int) -> Iterator[None]:
        """All time inside belongs to `part`, whatever is marked there."""
        with self.within(part):
            held, self._held = self._held, True
            try:
                yield
            finally:
                self._held = held

    def take(self) -> Spent:
        """What had been spent when the last mark was made."""
        self._paused = None
        return tuple(self.spent)

    def pause(self) -> Spent:
        """Until `begin`, or else `take`, time belongs to nothing. Returns what was spent before."""
        self.enter(self._part)
        self._paused = self.take()
        return self._paused

    def begin(self) -> None:
        """Time counts from now on, if it has been paused."""
        if self._paused is not None:
            self.spent[:] = perf_counter_ns(), *self._paused[1:]
            self._paused = None


class Within:
    """The context of `Timeline.within`: a class, since a generator's would take twice as long."""

    __slots__ = ("_before", "_part", "_timeline")

    def __init__(self, timeline: Timeline, part: int) -> None:
        self._timeline = timeline
        self._part = part

    def __enter__(self) -> None:
        self._before = self._timeline.enter(self._part)

    def __exit__(self, *_: object) -> None:
        self._timeline.enter(self._before)


class Event(Protocol):
    """What is recorded in the queue of a device: torch.cuda.Event, with timing."""

    def record(self) -> object:
        """Note the time when all is done that has been queued."""

    def query(self) -> bool:
        """Whether that has come."""

    def elapsed_time(self, end: Self, /) -> float:
        """Milliseconds from this event to a later one."""


class DeviceTimeline(Timeline):
    """The parts of one rank's time, by the clock of its device, which is never waited for.

    A mark is an event in the device's queue: what is queued after it belongs to the part, and so does
    the time for which the queue is empty. `spent`, on which results rest, stays the host's; `take`
    has the device's, as far as that is known to have come. It comes as far as the one number that
    each step fetches anyway, so a step's time is that from one fetch to the next.
    """

    hosts = False

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._free: list[Event] = []
        self._marks: list[tuple[Event, int]] = []
        self._known = [0 for _ in PARTS]
        super().__init__()

    def enter(self, part: int) -> int:
        """As by the clock of the host; and an event in the device's queue."""
        if self._held:
            return part
        self._mark(part)
        return super().enter(part)

    def take(self) -> Spent:
        """What the device has spent, as far as it is known without waiting for it."""
        host = super().take()
        self._resolve()
        return (host[CLOCK], *self._known)

    def begin(self) -> None:
        """As by the clock of the host."""
        if self._paused is not None:
            self._known[:] = self._paused[1:]
            self._free += [event for event, _ in self._marks]
            self._marks.clear()
            self._mark(self._part)
            super().begin()

    def _mark(self, part: int) -> None:
        event = self._free.pop() if self._free else self._event()
        event.record()
        self._marks.append((event, part))
        if len(self._marks) > UNRESOLVED:
            self._resolve()

    def _resolve(self) -> None:
        last = len(self._marks) - 1
        while last > 0 and not self._marks[last][0].query():
            last -= 1
        for (event, part), (after, _) in pairwise(self._marks[: last + 1]):
            self._known[part - 1] += round(event.elapsed_time(after) * 1e6)
            self._free.append(event)
        del self._marks[: max(0, last)]


def timeline_of(device: torch.device) -> Timeline:
    """By the device's own clock on CUDA, where work is only queued; elsewhere by the host's."""
    if device.type != "cuda":
        return Timeline()
    import torch

    return DeviceTimeline(lambda: torch.cuda.Event(enable_timing=True))


def columns(spent: Sequence[Spent]) -> dict[str, NDArray[np.int64]]:
    """By "wall" and part, the microseconds by which each of `spent` exceeds the one before.

    Not by "other". And "at", how long before the last each was. What is only zeros is left out.
    Rounding does not add up: the sum over all is that of the first and the last.
    """
    import numpy as np  # not for those who only read

    table = np.fromiter(chain.from_iterable(spent), np.int64).reshape(len(spent), -1)
    micros = np.ascontiguousarray(table.T) // 1000
    clock, parts = micros[CLOCK, 1:], np.diff(micros[1:])
    found = {"at": clock[-1] - clock, "wall": parts.sum(axis=0)}
    used = [number for number in range(1, len(PARTS)) if parts[number].any()]
    return found | {PARTS[number]: parts[number] for number in used}


class TickTimes:
    """What several steps in one tick are charged with: their own time; the first one with all else."""

    def __init__(self, begun: Spent) -> None:
        self._begun = self._last = begun
        self._charged: dict[str, list[int]] = {}

    def charge(self, spent: Spent, own: Mapping[str, Mapping[int, int]]) -> dict[str, Spent]:
        """Of `spent` until this tick, and nanoseconds by part of the others' own, each one's sums."""
        if not own:
            return {}
        rest = [now - was for now, was in zip(spent, self._last, strict=True)]
        self._last = spent
        for number, (name, parts) in enumerate(own.items()):
            sums = self._charged.setdefault(name, list(self._begun))
            sums[CLOCK] = spent[CLOCK]
            for part, nanoseconds in parts.items() if number else ():
                sums[part] += nanoseconds
                rest[part] -= nanoseconds
        first = self._charged[next(iter(own))]
        first[1:] = [was + more for was, more in zip(first[1:], rest[1:], strict=True)]
        return {name: tuple(self._charged[name]) for name in own}
