"""Seconds of a traced step: the work of ranks, and the collectives and messages that they wait for.

Ranks that compute at the same time share the cores of their node.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.time.rates import CONTENTION, ComputeSeconds, collective_seconds, compute_seconds
from shoal.tools.plan.time.step_time import Span, StepParts, add_span
from shoal.tools.plan.work.planned_step import PlannedStep, RankGroup, StepCollective, WorkSegment
from shoal.tools.plan.work.slowest import slowest


class Computation(NamedTuple):
    """Work that a rank can begin at a moment, in seconds on cores that it does not share."""

    start: float
    seconds: float


RankProcess = Generator[Computation | None, Any, None]
"""A rank: it yields a computation and is sent the moment of its end, or yields None while it waits."""


@dataclass
class _Computing:
    start: float
    left: float


class SharedCores:
    """The cores of each node, which its computing ranks share equally.

    Example:
        >>> from dataclasses import replace
        >>> from shoal.tools.plan.machine.machines import find_machine
        >>> machine = replace(find_machine("cpu"), devices=2, cores=1, threads=1)
        >>> ends = []
        >>> def rank():
        ...     ends.append((yield Computation(start=0.0, seconds=1.0)))
        >>> SharedCores(machine, 2, RankGroup(2, 1), [rank(), rank()]).run()
        >>> ends
        [2.0, 2.0]

    Args:
        machine: Each rank uses `threads` of its `cores`. Without cores, each rank has a device.
        size: Number of ranks of the training.
        group: The ranks that are simulated. Each other rank computes at the same time as one of them.
        ranks: The processes of this group.
    """

    def __init__(
        self, machine: Machine, size: int, group: RankGroup, ranks: Sequence[RankProcess]
    ) -> None:
        self._per_node = int(group.per_node(machine.devices))
        copies = min(size, machine.devices) / self._per_node
        self._most = math.inf if machine.cores is None else machine.cores / machine.threads / copies
        """The simulated ranks of a node that can compute at full speed."""
        self._ranks = ranks
        self._waiting: set[int] = set()
        self._running: dict[int, _Computing] = {}

    def run(self) -> None:
        """Run all ranks to their end. Raises RuntimeError if all of them wait for each other."""
        now = 0.0
        self._resume(dict.fromkeys(range(len(self._ranks))))
        while self._running or self._waiting:
            # After what other ranks have sent and called, those that wait may resume.
            self._resume(dict.fromkeys(self._waiting))
            if self._waiting and not self._running:
                raise RuntimeError("ranks of the pipeline wait for messages of each other")
            now = self._advance(now)
            self._resume({place: now for place, each in self._running.items() if each.left <= 0})

    def _resume(self, places: Mapping[int, float | None]) -> None:
        """Resume ranks, each of which has ended a computation at a moment or waits."""
        for place, end in places.items():
            self._waiting.discard(place)
            self._running.pop(place, None)
            try:
                found = self._ranks[place].send(end)
            except StopIteration:
                continue
            if found is None:
                self._waiting.add(place)
            else:
                self._running[place] = _Computing(*found)

    def _advance(self, now: float) -> float:
        """Compute until a rank begins or ends a computation, and return that moment."""
        active = {place: each for place, each in self._running.items() if each.start <= now}
        crowds = Counter(place // self._per_node for place in active)
        speeds = {place: min(1.0, self._most / crowds[place // self._per_node]) for place in active}
        ends = {place: now + each.left / speeds[place] for place, each in active.items()}
        starts = [each.start for each in self._running.values() if each.start > now]
        moment = min((*ends.values(), *starts), default=now)
        for place, each in active.items():
            each.left = 0.0 if ends[place] == moment else each.left - speeds[place] * (moment - now)
        return moment


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The predicted step of a rank: its seconds, and when it computes what."""

    time: StepParts
    spans: tuple[Span, ...]


@dataclass(kw_only=True)
class CollectiveTotal:
    """All calls of one kind of collective in a step. Seconds are those without other ones."""

    calls: int = 0
    count: int = 0
    seconds: float = 0.0


def mean_time(one: StepParts, others: StepParts, every: int) -> StepParts:
    """Return the mean time of steps, of which one in `every` takes the first time."""
    rest = others.parts
    mean = {name: value + (rest[name] - value) * (1 - 1 / every) for name, value in one.parts.items()}
    return StepParts(mean)


def with_imbalance(busiest: StepParts, mean: StepParts) -> StepParts:
    """Return the time of a step with the mean number of tokens, and what the busiest rank adds."""
    return StepParts({**mean.parts, "imbalance": max(0.0, busiest.total - mean.total)})


def run_ranks(
    ranks: Sequence[Sequence[WorkSegment]], plan: PlannedStep, machine: Machine
) -> list[RankRun]:
    """Return the predicted step of each rank of one pipeline.

    A rank waits for a message where it first reads it. The step ends when the last rank has finished.
    On a CPU, the ranks that compute at a moment share the cores.
    """
    size = plan.layout.size
    pipeline = _Pipeline(plan)
    timelines = [_Timeline(machine, place, pipeline) for place in range(len(ranks))]
    group = RankGroup(len(ranks), max(1, pipeline.stride))
    processes = [each.run(found) for each, found in zip(timelines, ranks, strict=True)]
    SharedCores(machine, size, group, processes).run()
    end = max(each.now for each in timelines)
    spread = machine.efficiency.spread * slowest(size)
    return [RankRun(time=each.time(end, spread), spans=tuple(each.spans)) for each in timelines]


class _Pipeline:
    """Messages and common collectives of the ranks of a pipeline."""

    def __init__(self, plan: PlannedStep) -> None:
        self.plan = plan
        self.arrivals: dict[tuple[int, int, int], float] = {}
        """When each message arrives, or its transfer can begin, by sender, receiver and number."""
        self.calls: defaultdict[int, dict[int, float]] = defaultdict(dict)
        """When each rank calls the collectives of all stages, by their order."""
        ranks = plan.layout.group(0, "pipeline")
        self.stride = ranks[1] - ranks[0] if len(ranks) > 1 else 0

    def meets(self, one: StepCollective) -> bool:
        """Return whether all stages take part in a collective that they wait for."""
        group = one.group
        spans = 0 < group.stride <= self.stride < group.stride * group.size
        return spans and one.wait != "update"


class _Timeline:
    """One rank that computes, and a network that runs one collective after the other."""

    def __init__(self, machine: Machine, place: int, pipeline: _Pipeline) -> None:
        self.machine = machine
        self.place = place
        self.now = self.waited = 0.0
        self.work = ComputeSeconds()
        self.optimizer = 0.0
        self.spans: list[Span] = []
        self._pipeline = pipeline
        self._meetings = 0
        self._network = 0.0
        self._prefetching = 0.0
        """The moment from which the next parameters may be gathered."""
        self._previous: StepCollective | None = None
        self._running: list[tuple[StepCollective, float]] = []
        self._idle = 0.0
        """Seconds in which they run and the rank waits."""

    def run(self, segments: Sequence[WorkSegment]) -> RankProcess:
        """Compute all segments."""
        for segment in segments:
            if segment.moment == "update":
                self.wait()
            yield from self.compute(segment)
            one = segment.collective
            if one is not None and one.operation == "send":
                self._pipeline.arrivals[self.place, one.peer, one.message] = self._sent(one)
            elif one is not None and one.operation == "recv":
                while (sent := (one.peer, self.place, one.message)) not in self._pipeline.arrivals:
                    yield None
                self._wait_until(self._arrival(one, self._pipeline.arrivals[sent]))
            elif one is not None:
                if self._pipeline.meets(one):
                    calls = self._pipeline.calls[self._meetings]
                    calls[self.place] = self.now
                    self._meetings += 1
                    while len(calls) < self._pipeline.plan.layout.pipeline:
                        yield None
                    self._wait_until(max(calls.values()))
                self.begin(one, alone=not segment.work.operations)
        self.wait()

    def compute(self, segment: WorkSegment) -> RankProcess:
        """Compute the work of a segment on cores that other ranks use too."""
        found = compute_seconds(segment.work, self._pipeline.plan, self.machine)
        begun = self.now
        self.now = yield Computation(begun, found.total)
        if segment.moment == "update":
            self.optimizer += self.now - begun
        elif found.total:
            self.work += found * ((self.now - begun) / found.total)
        add_span(self.spans, Span(segment.moment, begun, self.now))

    def time(self, end: float, spread: float) -> StepParts:
        """Return the seconds by part of a step that ends at `end`.

        The slowest device needs the fraction `spread` more for its computation.
        """
        work = self.work
        busy = work.total + self.optimizer
        parts = vars(work) | {
            "launch": work.launch + work.host,
            "optimizer": self.optimizer,
            # The difference of equal sums may be a residue of rounding.
            "communication": max(0.0, round(self.now - self.waited - busy, 12)),
            "bubble": self.waited + end - self.now,
            "stragglers": spread * busy,
            "imbalance": 0.0,
        }
        return StepParts.of(**{name: value for name, value in parts.items() if name != "host"})

    def _sent(self, message: StepCollective) -> float:
        """Return when a message arrives; with Gloo, when its transfer can begin."""
        if self.machine.cores is not None:
            return self.now
        self._network = max(self._network, self.now) + self._seconds(message)
        return self._network

    def _arrival(self, message: StepCollective, sent: float) -> float:
        """Return when a message has arrived: Gloo transfers it after the receiver has asked for it."""
        if self.machine.cores is None:
            return sent
        return max(self.now, sent) + self._seconds(message)

    def _wait_until(self, moment: float) -> None:
        self.waited += max(0.0, moment - self.now)
        self.now = max(self.now, moment)

    def begin(self, collective: StepCollective, *, alone: bool) -> None:
        """Call a collective; `alone` says that no operation lies between the previous one and it."""
        seconds = self._seconds(collective)
        previous, self._previous = self._previous, collective
        streams = collective.wait == "stream" and self.machine.cores is None
        if streams and collective.operation == "all_gather":
            # FSDP gathers the next parameters while it computes with the current ones.
            self._network = max(self._network, self._prefetching) + seconds
            waited = max(0.0, self._network - self.now)
            self.now += waited + self._slowed(collective, max(0.0, seconds - waited))
            self._prefetching = self.now
            return
        # HSDP sums over replicas on the stream on which it has reduced over shards.
        follows = alone and previous is not None and previous.operation == "reduce_scatter"
        reduces = streams and (collective.operation == "reduce_scatter" or follows)
        if reduces or collective.wait == "update":
            self._network = max(self._network, self.now) + seconds
            self._running.append((collective, seconds))
        else:
            self._idle += max(0.0, self._network - self.now)
            self.now = self._network = max(self._network, self.now) + seconds

    def wait(self) -> None:
        """Wait for all collectives."""
        waited = max(0.0, self._network - self.now)
        idle = self._idle + waited
        slow = sum(self._slowed(each, seconds) for each, seconds in self._running)
        total = sum(seconds for _, seconds in self._running)
        self.now += waited
        if total > idle:
            self.now += slow * (1 - idle / total)
        self._running, self._idle = [], 0.0

    def _seconds(self, one: StepCollective) -> float:
        return _seconds(one, self._pipeline.plan, self.machine)

    def _slowed(self, collective: StepCollective, seconds: float) -> float:
        """Return the seconds by which a collective delays the computation that it overlaps."""
        if self.machine.cores is None:
            return CONTENTION * seconds
        inside = collective.group.per_node(self.machine.devices) == collective.group.size
        return seconds if inside else 0.0  # within a node, cores copy the bytes


def collective_totals(
    segments: Sequence[WorkSegment], plan: PlannedStep, machine: Machine
) -> dict[str, CollectiveTotal]:
    """Return the collectives of a traced step by operation."""
    found: defaultdict[str, CollectiveTotal] = defaultdict(CollectiveTotal)
    for segment in segments:
        if (one := segment.collective) is not None:
            total = found[one.operation]
            total.calls += 1
            total.count += one.count
            total.seconds += _seconds(one, plan, machine)
    return dict(found)


def _seconds(one: StepCollective, plan: PlannedStep, machine: Machine) -> float:
    """Return the seconds of a collective that all ranks call, or of a message."""
    shared = machine.shared(min(plan.layout.size, machine.devices))
    operation = "send" if one.operation == "recv" else one.operation
    return float(collective_seconds(operation, one.count, one.group, shared))
