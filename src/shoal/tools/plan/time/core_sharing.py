"""Ranks that compute at the same time share the cores of their node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.work.segments import RankGroup


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
