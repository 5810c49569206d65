"""Bytes and seconds of each kind of collective, from the records of torch's flight recorder.

A collective therefore takes no extra time. Calls and bytes are exact as long as the recorder holds all
of a window; otherwise the newest calls represent all. The duration of a collective over Gloo is not
recorded. But the number of running collectives can be queried in microseconds, and that number, summed
over time, is the total time of all of them (Little 1961).

Bandwidths are defined as in NVIDIA's nccl-tests (PERFORMANCE.md): *algorithm* is bytes by seconds.
*bus* is that times the fraction that the busiest link carries, so it is comparable with the hardware's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from shoal.telemetry import flight_recorder
from shoal.telemetry.flight_recorder import CollectiveCall, GroupProgress
from shoal.util.clock import CLOCK
from shoal.util.grouping import group_by

_GATHERS = ("all_gather", "gather")
_SCATTERS = ("reduce_scatter", "scatter")
_SHARED = (*_GATHERS, *_SCATTERS, "all_to_all")
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_into_tensor": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}
_MOST_AT_ONCE = 64
"""If more operations than these are running, each look counts the oldest, which are executing."""


class CollectiveKind(NamedTuple):
    """The key of a sum: one operation of one group."""

    operation: str
    group: str
    backend: str


@dataclass
class CollectiveSum:
    """The sum over the calls of a kind; `seconds` is None if unknown."""

    calls: float = 0
    bytes: float = 0
    seconds: float | None = 0.0
    recorded: bool = True
    """Whether the recorder has the times; otherwise they are estimated from running calls."""
    all: bool = True
    """Whether every call was counted."""


def kind_of(call: CollectiveCall) -> CollectiveKind:
    """Return the kind of a call: `_all_gather_base` and `allgather_coalesced` are all-gathers."""
    return CollectiveKind(operation_name(call.operation), call.group, call.backend)


def operation_name(text: str) -> str:
    """Return the name of a collective in torch.distributed, from that of a record or an operator."""
    name = text.lower().split(" ")[0].strip("_")
    name = name.removesuffix("_coalesced").removesuffix("_base")
    return _NAMES.get(name, name)


def size_of(call: CollectiveCall, operation: str, ranks: int) -> int:
    """Return the bytes of a call as nccl-tests count them: of the full tensor, not of one part."""
    if operation in _GATHERS:
        return call.received or call.sent * ranks
    if operation in _SCATTERS:
        return call.sent or call.received * ranks
    return max(call.sent, call.received)


def bus_factor(operation: str, ranks: int) -> float:
    """Return the fraction of the bytes that the busiest link carries."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in _SHARED else 1.0


class CollectiveStats:
    """The traffic of this rank from now on, window by window."""

    def __init__(self, clock: Callable[[], float] = CLOCK.now) -> None:
        self._clock = clock
        self._waiting: dict[str, set[int]] = {}
        self._under_way: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._looked = self._begun = clock()
        # Earlier records, including those of earlier worlds, do not count.
        self._after = flight_recorder.newest_records()

    def look(self) -> None:
        """Sample the running collectives, at times that do not correlate with steps."""
        self.see(flight_recorder.group_progress())

    def see(self, progress: Mapping[str, GroupProgress]) -> None:
        """Attribute the time since the last look to the collectives that were running then."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        for key, (begun, ended) in progress.items():
            seen = min(begun - ended, _MOST_AT_ONCE)
            for number in range(ended + 1, ended + 1 + seen):
                self._under_way[key, number] += passed * (begun - ended) / seen

    def window(self) -> dict[str, Any]:
        """Return the fields of an event: the collectives that ended since the last call.

        See docs/monitoring/profiling.md.
        """
        sizes = {name: len(ranks) for name, ranks in flight_recorder.group_ranks().items()}
        oldest = {
            recorder: min([self._after.get(recorder, -1) + 1, *waiting]) - 1
            for recorder, waiting in self._waiting.items()
        }
        return self.count(flight_recorder.recorded_calls(self._after | oldest), sizes)

    def count(self, calls: Iterable[CollectiveCall], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the fields for these calls; `sizes` are the numbers of ranks of the groups."""
        now = self._clock()
        passed, self._begun = now - self._begun, now
        by_recorder = group_by(calls, lambda call: call.recorder)
        sums: dict[CollectiveKind, CollectiveSum] = {}
        for recorder, found in by_recorder.items():
            sums |= self._sum(recorder, found, sizes)
        living = {(each, n) for each, numbers in self._waiting.items() for n in numbers}
        everything = chain.from_iterable(by_recorder.values())
        kept = {(c.key, c.number) for c in everything if (c.recorder, c.record) in living}
        self._under_way = defaultdict(float, {k: self._under_way.get(k, 0.0) for k in kept})
        kinds = [_fields(kind, each, sizes.get(kind.group, 1)) for kind, each in sums.items()]
        return {"seconds": passed, "kinds": sorted(kinds, key=lambda kind: -kind["bytes"])}

    def _sum(
        self, recorder: str, calls: Sequence[CollectiveCall], sizes: Mapping[str, int]
    ) -> dict[CollectiveKind, CollectiveSum]:
        after, waiting = self._after.get(recorder, -1), self._waiting.get(recorder, set())
        newest = max(call.record for call in calls)
        fresh = [call for call in calls if call.record > after or call.record in waiting]
        begun = newest - after + len(waiting)
        share = begun / len(fresh) if fresh else 1.0
        sums: dict[CollectiveKind, CollectiveSum] = {}
        for call in fresh:
            if not call.done:
                continue
            kind = kind_of(call)
            one = sums.setdefault(kind, CollectiveSum())
            one.calls += share
            one.bytes += share * size_of(call, kind.operation, sizes.get(call.group, 1))
            one.all = share == 1.0
            took = call.seconds
            if took is None:
                one.recorded = False
                looked = call.backend == "gloo"
                took = self._under_way.pop((call.key, call.number), 0.0) if looked else None
            one.seconds = None if took is None or one.seconds is None else one.seconds + share * took
        self._after[recorder] = max(after, newest)
        self._waiting[recorder] = {call.record for call in fresh if not call.done}
        return sums


def _fields(kind: CollectiveKind, total: CollectiveSum, ranks: int) -> dict[str, Any]:
    timed = "recorded" if total.recorded else "unknown" if total.seconds is None else "estimated"
    fields: dict[str, Any] = {
        "kind": kind.operation,
        "group": kind.group,
        "ranks": ranks,
        "backend": kind.backend,
        "calls": round(total.calls),
        "bytes": round(total.bytes),
        "seconds": total.seconds or 0.0,
        "counted": "recorded" if total.all else "estimated",
        "timed": timed,
        "exact": total.all and timed == "recorded",
    }
    if total.seconds:
        fields["algorithm"] = total.bytes / total.seconds
        fields["bus"] = fields["algorithm"] * bus_factor(kind.operation, ranks)
    return fields
