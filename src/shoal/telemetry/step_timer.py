"""The time of a rank by part. At each moment it belongs to one part, from one mark to the next.

Loader, step, engines, saves and evaluation mark the start of a part. A mark ends the part before, so
parts are disjoint and add up to the total time, for any marks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from shoal.util.clock import CLOCK, Clock

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
"""The parts of time; `other` is time without a mark, the script's own."""
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
AT = 0

Spent: TypeAlias = tuple[int, ...]
"""A clock value, then the time spent on each of PARTS until then; nanoseconds."""

UNRESOLVED = 4096
"""Number of marks on a device that are kept before the device is queried: more than those of a step.

FSDP makes up to twelve for each of its modules, and each query takes time of the step.
"""


class Timeline:
    """The parts of one rank's time, by the host's clock.

    `spent` is a clock value, then nanoseconds by part, which only increase. It is one list of integers,
    since about eight marks are made in a step.
    """

    hosts = True
    """Whether `take` uses the host's clock, as `spent` does."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._now = clock.now_ns
        self.spent = [self._now(), *(0 for _ in PARTS)]
        self._part = OTHER
        self._held = False
        self._paused: Spent | None = self.take()

    def enter(self, part: int) -> int:
        """Assign the time from now on to `part`. Return the part before, to enter it again."""
        if self._held:
            return part
        spent, before = self.spent, self._part
        now = self._now()
        spent[before] += now - spent[AT]
        spent[AT] = now
        self._part = part
        return before

    def within(self, part: int) -> TimedContext:
        """Return a context that counts its time as `part`."""
        return TimedContext(self, part)

    @contextmanager
    def during(self, part: int) -> Iterator[None]:
        """Assign all time inside to `part`, and ignore its marks."""
        with self.within(part):
            held, self._held = self._held, True
            try:
                yield
            finally:
                self._held = held

    def take(self) -> Spent:
        """Return the time spent by part until the last mark."""
        self._paused = None
        return tuple(self.spent)

    def pause(self) -> Spent:
        """Assign no time to any part until `begin` or `take`. Return the time spent before."""
        self.enter(self._part)
        self._paused = self.take()
        return self._paused

    def begin(self) -> None:
        """Resume the measurement if it was paused."""
        if self._paused is not None:
            self.spent[:] = self._now(), *self._paused[1:]
            self._paused = None


class TimedContext:
    """The context of `Timeline.within`: a class, since a generator would take twice as long."""

    __slots__ = ("_before", "_part", "_timeline")

    def __init__(self, timeline: Timeline, part: int) -> None:
        self._timeline = timeline
        self._part = part

    def __enter__(self) -> None:
        self._before = self._timeline.enter(self._part)

    def __exit__(self, *_: object) -> None:
        self._timeline.enter(self._before)


class Event(Protocol):
    """An event in the queue of a device, such as torch.cuda.Event, with timing."""

    def record(self) -> object:
        """Record the time at which all queued work is done."""

    def query(self) -> bool:
        """Return whether that work is done."""

    def elapsed_time(self, end: Self, /) -> float:
        """Return the milliseconds from this event to a later one."""


class DeviceTimeline(Timeline):
    """The parts of one rank's time, by the clock of its device, without waiting for it.

    A mark is an event in the device's queue: work queued after it belongs to the part, and so does the
    time for which the queue is empty. `spent`, on which results are based, stays the host's. `take` has
    the device's time up to the last event known to be done. That event is the fetch of the one number
    that each step fetches anyway, so the time of a step is that from one fetch to the next.
    """

    hosts = False

    def __init__(self, event: Callable[[], Event], clock: Clock = CLOCK) -> None:
        self._event = event
        self._free: list[Event] = []
        self._marks: list[tuple[Event, int]] = []
        self._known = [0 for _ in PARTS]
        super().__init__(clock)

    def enter(self, part: int) -> int:
        """Enter a part as on the host's clock, and put an event into the device's queue."""
        if self._held:
            return part
        self._mark(part)
        return super().enter(part)

    def take(self) -> Spent:
        """Return the device's time by part, as far as it is known without waiting for it."""
        host = super().take()
        self._resolve()
        return (host[AT], *self._known)

    def begin(self) -> None:
        """Resume, as on the host's clock."""
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
        # Events are done in their order. After a mark, at least the first is kept as the beginning.
        last = bisect_left(self._marks, True, lo=1, key=lambda mark: not mark[0].query()) - 1
        for (event, part), (after, _) in pairwise(self._marks[: last + 1]):
            self._known[part - 1] += round(event.elapsed_time(after) * 1e6)
            self._free.append(event)
        del self._marks[: max(0, last)]


def timeline_of(device: torch.device) -> Timeline:
    """Return a timeline on the device's clock where the device has streams, else on the host's."""
    if device.type == "cpu":
        return Timeline()
    from shoal.util import accelerator  # imports torch

    module = accelerator.streams(device)
    return Timeline() if module is None else DeviceTimeline(lambda: module.Event(enable_timing=True))


def columns(spent: Sequence[Spent]) -> dict[str, NDArray[np.int64]]:
    """Return by "wall" and part the microseconds by which each of `spent` exceeds the one before.

    "other" is left out. "at" is the time before the last one. Columns with only zeros are left out.
    Rounding errors do not add up: the sum of a column is the difference of the first and the last.
    """
    import numpy as np  # not needed by processes that only read

    table = np.fromiter(chain.from_iterable(spent), np.int64).reshape(len(spent), -1)
    micros = np.ascontiguousarray(table.T) // 1000
    clock, parts = micros[AT, 1:], np.diff(micros[1:])
    found = {"at": clock[-1] - clock, "wall": parts.sum(axis=0)}
    used = [number for number in range(1, len(PARTS)) if parts[number].any()]
    return found | {PARTS[number]: parts[number] for number in used}


class TickTimes:
    """The times of the steps in one tick. The first step also gets the time outside of all steps."""

    def __init__(self, begun: Spent) -> None:
        self._begun = self._last = begun
        self._charged: dict[str, list[int]] = {}

    def charge(self, spent: Spent, own: Mapping[str, Mapping[int, int]]) -> dict[str, Spent]:
        """Split `spent` until this tick into the sums of each step; `own` is in nanoseconds by part."""
        if not own:
            return {}
        rest = [now - was for now, was in zip(spent, self._last, strict=True)]
        self._last = spent
        for number, (name, parts) in enumerate(own.items()):
            sums = self._charged.setdefault(name, list(self._begun))
            sums[AT] = spent[AT]
            for part, nanoseconds in parts.items() if number else ():
                sums[part] += nanoseconds
                rest[part] -= nanoseconds
        first = self._charged[next(iter(own))]
        first[1:] = [was + more for was, more in zip(first[1:], rest[1:], strict=True)]
        return {name: tuple(self._charged[name]) for name in own}
