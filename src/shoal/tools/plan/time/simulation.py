"""Seconds of a traced step: the work of ranks, and the collectives and messages that they wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.time.collectives import CONTENTION, collective_seconds
from shoal.tools.plan.time.core_sharing import Computation, RankProcess, SharedCores
from shoal.tools.plan.time.rates import ComputeSeconds, compute_seconds
from shoal.tools.plan.time.seconds import Span, StepParts, add_span
from shoal.tools.plan.time.step_time import slowest
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.segments import RankGroup, StepCollective, WorkSegment


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
