"""A time limit on which all ranks agree."""

from __future__ import annotations

from shoal.distributed.world import World
from shoal.util.clock import CLOCK, Clock

CHECK_SECONDS = 5.0
"""Shortest time in seconds between two checks of the clock."""


class Deadline:
    """A time limit in seconds that is reached on all ranks at the same step.

    It needs no collective in every step: when rank 0 reads its clock, it also broadcasts the step of
    the next reading, after as many steps as fit into CHECK_SECONDS or into the remaining time. All
    ranks count the same steps. Only `seconds` of rank 0 count; None means no limit, on any rank.
    """

    def __init__(self, seconds: float | None, world: World, clock: Clock = CLOCK) -> None:
        self._seconds = seconds
        self._world = world
        self._clock = clock
        self._begun = self._looked = self._clock.now()
        self._steps = 0
        self._at, self._next = 0, 1

    def over(self) -> bool:
        """Return whether the time is over after this step. Collective at the agreed steps."""
        self._steps += 1
        if self._seconds is None or self._steps < self._next:
            return False
        stop, self._next = self._world.broadcast(self._look(self._clock.now()))
        return bool(stop)

    def _look(self, now: float) -> tuple[bool, int]:
        left = (self._seconds or 0.0) - (now - self._begun)
        timed = self._steps - self._at
        each = (now - self._looked) / timed
        self._looked, self._at = now, self._steps
        # Half of the remaining time, and at most twice the steps just timed: steps may become slower.
        fit = int(min(CHECK_SECONDS, left / 2) / max(each, 1e-6))
        return left <= 0, self._steps + max(1, min(fit, 2 * timed))
