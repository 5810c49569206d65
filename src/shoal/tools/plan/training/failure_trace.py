"""Failures of nodes, or the capacity of a spot market, over time, read from a CSV file."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.util.errors import ShoalError

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
