"""A training in simulated time over a trace of failures, driven by the decisions of the launcher.

The trace is a CSV file of failures of nodes, or of the capacity of a spot market, over time.
"""

from __future__ import annotations

import csv
import math
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed.failure import Failure
from shoal.launcher.attempt_outcome import AttemptOutcome, NodeReport, decide_outcome, may_restart
from shoal.launcher.failure_history import FailureHistory
from shoal.launcher.nodes import SILENCE
from shoal.util.errors import ShoalError
from shoal.util.units import duration

OUTAGES = ("at", "node", "back")
"""Columns of a trace of nodes; a fourth, `cause`, may follow."""
CAPACITY = ("at", "nodes")
_LAST = 1e10
"""Seconds, over 300 years: what is later does not count."""
_EXAMPLE = "a CSV file that begins with at,node,back or at,nodes"


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """A change at a time in seconds from the start: the nodes that are up after it.

    `failed` is the node of a process that has died, while the node stays up; `cause` is the place of
    its error, if known.
    """

    at: float
    up: frozenset[int]
    failed: int | None = None
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class _Change:
    at: float
    down: frozenset[int] = frozenset()
    up: frozenset[int] = frozenset()
    capacity: int | None = None
    failed: int | None = None
    cause: str = ""


def read_trace(path: Path, pool: int) -> tuple[FleetEvent, ...]:
    """Return the events of a trace for a pool of nodes, in the order of time.

    A line `at,node,back` is the death of a node at a time, which is back after some seconds; with
    `back` 0, only a process on it dies. A line `at,nodes` is a number of nodes that are there from a
    time on.

    Raises ShoalError for other columns and values, and for nodes outside the pool.
    """
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _wrong(path, str(error)) from None
    head = tuple(word.strip() for word in rows[0]) if rows else ()
    if head[:3] != OUTAGES and head != CAPACITY:
        raise _wrong(path, f"the first line is {','.join(head)!r}")
    changes: list[_Change] = []
    for number, row in enumerate(rows[1:], 2):
        if row:
            changes += _changes(head, row, pool, f"line {number} of {path}")
    return tuple(_events(changes, pool))


def time_between_failures(events: Sequence[FleetEvent], nodes: int, pool: int) -> float:
    """Return the mean seconds between failures of `nodes` of the pool, as far as the trace goes."""
    failures, before = 0.0, frozenset(range(pool))
    for each in events:
        if each.at:
            failures += len(before - each.up) + (each.failed is not None)
        before = each.up
    return events[-1].at * pool / (nodes * failures) if failures else math.inf


def _changes(head: Sequence[str], row: Sequence[str], pool: int, where: str) -> list[_Change]:
    try:
        at, number = float(row[0]), int(row[1])
        back = float(row[2]) if head != CAPACITY else 0.0
    except (ValueError, IndexError):
        at, number, back = math.nan, 0, 0.0
    if len(row) > len(head) or not (0 <= at <= _LAST and back >= 0):
        raise _wrong(
            where, f"{','.join(row)!r}: the values of {','.join(head)} must be numbers, not negative"
        )
    most = pool if head == CAPACITY else pool - 1
    if not 0 <= number <= most:
        raise ShoalError(
            given=where,
            found=f"{head[1]} is {number}, and there are {pool} nodes with those in spare=…",
            fix=f"a number from 0 to {most}, or a larger spare=… in --training",
        )
    if head == CAPACITY:
        return [_Change(at=at, capacity=number)]
    if not back:
        return [_Change(at=at, failed=number, cause=row[3] if len(row) > 3 else "")]
    node = frozenset((number,))
    return [_Change(at=at, down=node), _Change(at=at + back, up=node)]


def _events(changes: Sequence[_Change], pool: int) -> Iterator[FleetEvent]:
    up, outages = frozenset(range(pool)), Counter[int]()
    for each in sorted(changes, key=lambda change: change.at):
        outages.update(each.down)
        outages.subtract(each.up)
        ended = frozenset(node for node in each.up if not outages[node])
        up = (up - each.down) | ended if each.capacity is None else frozenset(range(each.capacity))
        if each.at <= _LAST:
            yield FleetEvent(at=each.at, up=up, failed=each.failed, cause=each.cause)


def _wrong(given: object, found: str) -> ShoalError:
    return ShoalError(given=str(given), found=found, fix=_EXAMPLE)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How a training runs on its nodes.

    `nodes` is the number that it wants, `least` the number with which it continues (as for `shoal run
    --nodes LEAST:NODES`); if they are equal, it waits in the queue for all. After at most `restarts`
    failures of processes it starts again. An elastic training waits for `wait` seconds for `least`
    nodes. `start` is the number of seconds from enough nodes to the next step, `restart` that from a
    failure to the next step if the nodes are there, `save` that for which a save blocks, and `interval`
    that between saves.
    """

    nodes: int
    least: int
    restarts: int
    wait: float
    start: float
    restart: float
    save: float
    interval: float


@dataclass(kw_only=True)
class TrainingTime:
    """The seconds of a training, by what they are spent on, and the number of failures."""

    queue: float = 0.0
    steps: float = 0.0
    saves: float = 0.0
    repeated: float = 0.0
    restarts: float = 0.0
    failures: int = 0
    start: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from submission to the end."""
        return self.queue + self.waiting + self.occupied

    @property
    def occupied(self) -> float:
        """Seconds for which the devices are in use."""
        return self.start + self.steps + self.saves + self.repeated + self.restarts


def rehearse(
    fleet: Fleet, events: Sequence[FleetEvent], pool: int, step: float, steps: int
) -> tuple[TrainingTime, float]:
    """Return the time of a training of some steps, of `step` seconds on all nodes, over a trace.

    The second number is that of the seconds of nodes that are paid for.

    A training that has fewer nodes takes longer steps: the global batch is the same.

    Raises ShoalError if it does not end: no restarts are left, or too few nodes come back.
    """
    training = _RehearsedTraining(fleet, step, steps)
    there = [each.up for each in events if not each.at]
    training.begin(FleetEvent(at=0.0, up=there[-1] if there else frozenset(range(pool))))
    for event in (each for each in events if each.at):
        if training.advance(event.at):
            return training.time, training.used
        training.apply(event)
    if not training.advance(math.inf):
        raise _too_few(fleet, "too few nodes are left at the end of the trace")
    return training.time, training.used


class _RehearsedTraining:
    """A training at one time of its rehearsal."""

    def __init__(self, fleet: Fleet, step: float, steps: int) -> None:
        self._fleet, self._step, self._left = fleet, step, steps
        self._now = self._since = self._pending = 0.0
        self._members: tuple[int, ...] = ()
        self._needed = 0.0
        """The time from which nodes are missing or the training starts again."""
        self._ready = math.inf
        self._started = False
        self._restarts = 0
        self._history = FailureHistory()
        self.time, self.used = TrainingTime(), 0.0

    def begin(self, event: FleetEvent) -> None:
        """Start for the first time, if enough nodes are there."""
        self._pending = self._fleet.start
        self._gather(event, 0.0)

    @property
    def _pace(self) -> float:
        """Seconds of a step on the present nodes."""
        return self._step * self._fleet.nodes / len(self._members)

    @property
    def _segment(self) -> int:
        return max(1, math.ceil(min(self._left, self._fleet.interval / self._pace)))

    def advance(self, until: float) -> bool:
        """Simulate up to a time; return whether the training has ended before."""
        if not self._members and math.isinf(until):
            return False
        begins = min(until, self._ready)
        if begins > self._now:
            self._wait(begins - self._now)
        if until <= self._now:
            return False
        time, segment, pace = self.time, self._segment, self._pace
        self._started = True
        length = segment * pace + self._fleet.save
        rest = self._left * pace + math.ceil(self._left / segment) * self._fleet.save
        spent = self._since + until - self._now
        whole = spent >= rest
        complete = math.ceil(self._left / segment) if whole else int(spent // length)
        done = self._left if whole else min(self._left, complete * segment)
        self._use((rest if whole else spent) - self._since)
        time.steps += done * pace
        time.saves += complete * self._fleet.save
        self._left -= done
        self._since = 0.0 if whole else spent - complete * length
        self._now = until
        return whole

    def apply(self, event: FleetEvent) -> None:
        """Let the launcher decide what follows from an event."""
        if not self._members:
            self._gather(event, self._needed)
            return
        outcome = decide_outcome(self._report(event), patience=SILENCE)
        if outcome is None:
            return
        fleet, time = self._fleet, self.time
        if outcome.saving:
            self._save_progress()
        else:
            time.failures += 1
        if outcome.kind == "failed":
            if not may_restart(outcome, self._restarts, fleet.restarts):
                raise _ended(event, outcome, fleet)
            self._restarts += 1
            self._history = outcome.history
        time.repeated += self._since
        self._since = 0.0
        self._pending = fleet.restart if self._started else fleet.start
        self._gather(event, event.at)

    def _report(self, event: FleetEvent) -> NodeReport:
        names = {node: str(node) for node in event.up | set(self._members)}
        room = self._fleet.nodes - len(self._members) if self._fleet.least < self._fleet.nodes else 0
        waiting = sorted(event.up - set(self._members))[: max(0, room)]
        failure = None
        if event.failed in self._members:
            place = f"node {event.failed}" + (f", {event.cause}" if event.cause else "")
            failure = Failure(
                rank=self._members.index(event.failed),
                code=1,
                when=0.0,
                where=place,
                # An exception is known by its step, too: the trace has one for each place.
                signal=0 if event.cause else int(signal.SIGKILL),
                step=0 if event.cause else None,
            )
        return NodeReport(
            me=names[self._members[0]],
            nodes=[names[node] for node in self._members],
            present=[names[node] for node in self._members if node in event.up],
            waiting=[names[node] for node in waiting],
            labels={},
            failure=failure,
            since=math.inf,
            history=self._history,
        )

    def _save_progress(self) -> None:
        """Keep the complete steps: if a node joins, ranks save, which is a part of the restart."""
        if self._now < self._ready or not self._since:
            return
        pace = self._pace
        done = min(self._segment, int(self._since // pace))
        self.time.steps += done * pace
        self._left -= done
        self._since -= done * pace

    def _gather(self, event: FleetEvent, needed: float) -> None:
        """Take the first nodes that are up, if they are enough."""
        fleet = self._fleet
        self._needed = needed
        self._members = tuple(sorted(event.up)[: fleet.nodes])
        if len(self._members) < fleet.least:
            self._members, self._ready = (), math.inf
            return
        waited = event.at - needed
        if fleet.least < fleet.nodes and waited > fleet.wait:
            raise _too_few(fleet, f"it waited {duration(waited)} for enough nodes")
        restart = fleet.restart if self._started else fleet.start
        self._ready = max(needed + restart, event.at + fleet.start)

    def _wait(self, seconds: float) -> None:
        """Spend time before the next step: on the start or restart, then on waiting for nodes."""
        used = min(seconds, self._pending)
        if self._started:
            self.time.restarts += used
        else:
            self.time.start += used
        self.time.waiting += seconds - used
        self._pending -= used
        self._use(used)
        self._now += seconds

    def _use(self, seconds: float) -> None:
        self.used += seconds * (len(self._members) or self._fleet.nodes)


def _ended(event: FleetEvent, outcome: AttemptOutcome, fleet: Fleet) -> ShoalError:
    found = f"after {duration(event.at)}, {outcome.text}, and "
    found += (
        "it repeats the failure before it"
        if outcome.history.end
        else f"no restart of {fleet.restarts} is left"
    )
    return ShoalError(
        given="--training with this trace", found=found, fix="a larger restarts=…, or fewer failures"
    )


def _too_few(fleet: Fleet, found: str) -> ShoalError:
    return ShoalError(
        given=f"--training with a trace, for at least {fleet.least} of {fleet.nodes} nodes",
        found=found,
        fix="a smaller least=…, a larger spare=… or wait=…, or a trace in which nodes come back",
    )
