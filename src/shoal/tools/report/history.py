"""The events of a run in memory: steps by attempt and rank as arrays, other events unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.telemetry import step_timer
from shoal.telemetry.events import EventKind

PARTS = step_timer.PARTS[1:]
"""The parts of a step that a rank records. They do not overlap. The rest of `wall` is the script's
own time."""

STEP = np.dtype(
    [
        ("step", "i8"),
        ("time", "f8"),
        ("size", "i4"),
        ("loss", "f4"),
        ("counted", "f4"),
        ("wall", "f4"),
        ("load", "f4"),
        *((part, "f4") for part in PARTS),
    ]
)
"""One step of one rank: `time` of its tick in seconds since the epoch, durations in seconds.

`load` is the time to make the batch, in the worker if the loader has workers.
"""

USAGE = np.dtype(
    [
        ("time", "f8"),
        ("step", "f8"),
        ("rss", "f8"),
        ("device_memory", "f8"),
        ("device_peak", "f8"),
        ("power", "f8"),
        ("energy", "f8"),
        ("utilization", "f8"),
        ("cpu", "f8"),
    ]
)
"""One sample of a rank's usage, in bytes, watts, joules and cores; NaN if it was not recorded."""

Array = NDArray[Any]
Event = Mapping[str, Any]


class GrowingArray:
    """An array that grows at its end, without moving rows to which others hold views."""

    def __init__(self, kind: np.dtype[Any]) -> None:
        self._held = np.empty(0, kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def all(self) -> Array:
        """All rows so far."""
        return self._held[: self._count]

    def __getstate__(self) -> Array:
        return self.all

    def __setstate__(self, rows: Array) -> None:
        self._held, self._count = rows, len(rows)

    def append(self, count: int) -> Array:
        """Append `count` rows of zeros, and return them to be filled in."""
        end = self._count + count
        if end > len(self._held):
            # Pages that were never written take no memory, so reserving twice the size is free.
            grown = np.zeros(max(2 * end, 1024), self._held.dtype)
            grown[: self._count] = self.all
            self._held = grown
        self._count = end
        return self._held[end - count : end]

    def shorten(self, keep: int) -> None:
        """Drop all but the newest `keep` rows once there are twice as many."""
        if self._count > 2 * keep:
            self._held, self._count = self.all[-keep:].copy(), keep


@dataclass
class TrafficTotal:
    """The traffic of one rank by one kind of collective in one group, over an attempt.

    `bytes` are those of the rank's own tensors. `seconds` is the sum of the durations of all calls.
    `algorithm` and `bus` are bytes per second. `exact` is False if times are estimated.
    """

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    exact: bool = True
    moved: float = 0.0
    """Bus bandwidth times seconds, summed over calls."""

    @property
    def algorithm(self) -> float:
        """The bytes of all calls divided by their seconds."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus(self) -> float:
        """The bus bandwidth, the number to compare with the rating of the hardware."""
        return self.moved / self.seconds if self.seconds > 0 else 0.0


TrafficKey = tuple[str, str, int, str]
"""The kind of a collective, its group, the number of ranks in it, and the backend."""


@dataclass
class Attempt:
    """One start of the run: all events of its ranks until they ended or were killed."""

    began: float
    starts: dict[int, Event] = field(default_factory=dict)
    steps: dict[tuple[int, str], GrowingArray] = field(default_factory=dict)
    usage: dict[int, GrowingArray] = field(default_factory=dict)
    traffic: dict[tuple[int, TrafficKey], TrafficTotal] = field(default_factory=dict)
    experts: dict[tuple[int, str], list[Event]] = field(default_factory=dict)
    """The last two events with the tokens of experts, by rank and name of the Step."""
    events: list[tuple[int, Event]] = field(default_factory=list)
    seen: float = 0.0
    """Time of the last event of any rank."""

    @property
    def size(self) -> int:
        """The number of ranks, whether or not all have left a file."""
        said = [start["size"] for start in self.starts.values() if type(start.get("size")) is int]
        return max([*said, len(self.ranks)], default=0)

    @property
    def ranks(self) -> list[int]:
        """The ranks with at least one event."""
        return sorted({*self.starts, *(rank for rank, _ in self.steps)})

    @property
    def missing(self) -> list[int]:
        """The ranks without any event."""
        there = set(self.ranks)
        return [rank for rank in range(min(self.size, 1 << 20)) if rank not in there]

    @property
    def counting(self) -> str | None:
        """The name of the Step that counts the steps: of several, the one with most steps."""
        tracks = ((name, rows) for (_, name), rows in self.steps.items() if len(rows))
        newest = {name: int(rows.all["step"][-1]) for name, rows in tracks}
        return max(newest, key=lambda name: newest[name], default=None)

    def first_of(self, name: str | None) -> int | None:
        """Return the first step that the Step of this name took; None if it has taken none."""
        tracks = (rows for (_, own), rows in self.steps.items() if own == name and len(rows))
        return min((int(rows.all["step"][0]) for rows in tracks), default=None)

    @property
    def first(self) -> int:
        """The first step that this attempt took."""
        begin = self.first_of(self.counting)
        if begin is not None:
            return begin
        said = [start["step"] for start in self.starts.values() if type(start.get("step")) is int]
        return min(said, default=0)

    @property
    def last(self) -> int:
        """The newest step that any rank has recorded."""
        ends = [int(rows.all["step"][-1]) for rows in self.steps.values() if len(rows)]
        return max(ends, default=self.first)

    def workers(self, rank: int) -> int:
        """Return the number of loader workers of a rank; 0 if it has none or did not record them."""
        said = self.starts.get(rank, {}).get("workers")
        return said if type(said) is int and said > 0 else 0

    def host(self, rank: int) -> str | None:
        """Return the host of a rank; None if it is unknown."""
        host = self.starts.get(rank, {}).get("host")
        return host[:200] if isinstance(host, str) and host else None

    def place(self, rank: int) -> str:
        """Return the name of a rank in texts: `rank 2 on node7`."""
        host = self.host(rank)
        return f"rank {rank}" if host is None else f"rank {rank} on {host}"

    def said(self, kind: EventKind) -> list[tuple[int, Event]]:
        """Return all events of a kind, with the rank that wrote each."""
        return [(rank, event) for rank, event in self.events if event["event"] == kind]

    def ticks(self, rank: int) -> Array:
        """Return the steps of a rank, one row for each tick.

        If several Steps take one batch, as in a GAN, only the first has a `wall`; the times of the
        others are added to its row. Rows are numbered by the Step with most steps.
        """
        tracks = [rows.all for (owner, _), rows in self.steps.items() if owner == rank and len(rows)]
        if not tracks:
            return np.empty(0, STEP)
        return tracks[0] if len(tracks) == 1 else _merged(tracks)


@dataclass
class History:
    """All events of a run directory."""

    directory: Path
    attempts: list[Attempt] = field(default_factory=list)
    """In the order in which the ranks recorded them, since clocks of hosts may be wrong or set back."""
    files: int = 0
    """Number of ranks that have left a file."""
    skipped: int = 0
    """Number of lines that are not events; a kill leaves one."""
    unread: dict[int, str] = field(default_factory=dict)
    """Ranks whose file could not be read completely, with the reason."""

    @property
    def latest(self) -> Attempt | None:
        """The last attempt, if there is any."""
        return self.attempts[-1] if self.attempts else None

    @property
    def world(self) -> int:
        """The number of ranks of the last attempt."""
        return self.latest.size if self.latest is not None else 0

    def join(self, other: History) -> None:
        """Add the events of other ranks."""
        before = None
        for theirs in other.attempts:
            ours = before = self.attempt(theirs.began, after=before)
            ours.starts |= theirs.starts
            ours.steps |= theirs.steps
            ours.usage |= theirs.usage
            ours.traffic |= theirs.traffic
            ours.experts |= theirs.experts
            ours.events += theirs.events
            ours.seen = max(ours.seen, theirs.seen)
        self.files += other.files
        self.skipped += other.skipped
        self.unread |= other.unread

    def attempt(self, began: float, *, after: Attempt | None = None) -> Attempt:
        """Return the attempt that began at a time; a new one if there is none yet.

        `after` is the attempt that the same rank recorded before it. Attempts that no file has in
        common are ordered by time.
        """
        known = next((each for each in self.attempts if each.began == began), None)
        if known is not None:
            return known
        place = 0 if after is None else 1 + self.attempts.index(after)
        while place < len(self.attempts) and self.attempts[place].began < began:
            place += 1
        self.attempts.insert(place, Attempt(began))
        return self.attempts[place]


def _merged(tracks: list[Array]) -> Array:
    every = np.concatenate(tracks)
    # Times are written in whole microseconds: the rows of one tick differ by at most one.
    every = every[np.argsort(every["time"] + 5e-6 * (every["wall"] <= 0), kind="stable")]
    heads = np.flatnonzero(every["wall"] > 0)
    if not len(heads):
        return every
    # Rows before the first head belong to an earlier tick, whose first row was dropped.
    every, heads = every[heads[0] :], heads - heads[0]
    owners = np.searchsorted(heads, np.arange(len(every)), side="right") - 1
    merged = every[heads]
    for part in PARTS:
        merged[part] = np.bincount(owners, weights=every[part], minlength=len(heads))
    # A Step that is not taken on every batch has smaller numbers, which would be out of order here.
    np.maximum.at(merged["step"], owners, every["step"])
    np.maximum.accumulate(merged["step"], out=merged["step"])
    return np.asarray(merged)


def number_in(event: Event, name: str) -> float | None:
    """Return a field that is a finite number, or None."""
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return None
    return float(value)


def integer_in(event: Event, name: str) -> int | None:
    """Return a field that is an integer, or None."""
    value = event.get(name)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def text_in(event: Event, name: str) -> str:
    """Return a field that is a string, or an empty one, truncated to the length of a line."""
    value = event.get(name)
    return value[:500] if isinstance(value, str) else ""
