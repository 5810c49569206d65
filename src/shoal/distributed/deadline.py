"""How all ranks come to the same answer where a clock decides."""

from __future__ import annotations

import time

from shoal.distributed.world import World

CHECK_SECONDS = 5.0
"""How often, at most, ranks agree on whether the time is over."""


class Deadline:
    """Over after so many seconds, on all ranks at the same step, without a collective in every step.

    Rank 0 looks at its clock; when it does, it also says at which step it will look again: after as
    many as fit into CHECK_SECONDS, or into what is left. All ranks count the same steps. Only rank
    0's `seconds` count; without a number it is never over, on any rank.
    """

    def __init__(self, seconds: float | None, world: World) -> None:
        self._seconds = seconds
        self._world = world
        self._begun = self._looked = time.monotonic()
        self._steps = 0
        self._at, self._next = 0, 1

    def over(self) -> bool:
        """Whether the time is over after this step. Collective at the steps agreed on."""
        self._steps += 1
        if self._seconds is None or self._steps < self._next:
            return False
        stop, self._next = self._world.broadcast(self._look(time.monotonic()))
        return bool(stop)

    def _look(self, now: float) -> tuple[bool, int]:
        left = (self._seconds or 0.0) - (now - self._begun)
        timed = self._steps - self._at
        each = (now - self._looked) / timed
        self._looked, self._at = now, self._steps
        # Half of what is left, and no more than twice the steps just timed: steps may grow slower.
        fit = int(min(CHECK_SECONDS, left / 2) / max(each, 1e-6))
        return left <= 0, self._steps + max(1, min(fit, 2 * timed))
