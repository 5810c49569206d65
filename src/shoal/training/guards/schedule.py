"""The schedule of a guard's checks: the same steps on all ranks, within the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.distributed.world import World
from shoal.telemetry.events import Plain
from shoal.util.clock import CLOCK, Clock

_FIRST = 2
"""The step of the first check, counted from the start of the Run: the first step does other work too.
"""


@dataclass(frozen=True, kw_only=True)
class GuardTimes:
    """The times of a rank that decide when it can afford the next check, in seconds.

    `spent` is the time of all checks so far, `check` that of one, `elapsed` the time of the run, and
    `step` that of one optimizer step without a check.
    """

    spent: float
    check: float
    elapsed: float
    step: float


def steps_to_next_check(times: GuardTimes, budget: float) -> int:
    """Return in how many steps another check leaves the total below `budget`; 1 or more."""
    affordable = (times.spent + times.check) / budget  # the run must have lasted this long by then
    return max(1, math.ceil((affordable - times.elapsed) / max(times.step, 1e-9)))


class CheckSchedule:
    """The steps of the checks of one guard, and the time that they have taken on this rank.

    `due` is the number of the step to check next; None from the check until `plan`.
    """

    def __init__(self, world: World, *, budget: float, step: int, clock: Clock = CLOCK) -> None:
        self._world = world
        self._clock = clock
        self._budget = budget
        self.due: int | None = step + _FIRST
        self._began = self._clock.now()
        self._steps = self._checks = 0
        self._spent = self._before = 0.0

    def count_step(self) -> None:
        """Count a step of the run."""
        self._steps += 1

    def is_due(self, step: int) -> bool:
        """Return whether a step is to be checked."""
        return self.due is not None and step >= self.due

    def begin(self) -> None:
        """Begin a check. The next one is not known until `plan`."""
        self.due = None
        self._checks += 1
        self._before = self._spent

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside the block as that of the checks."""
        began = self._clock.now()
        try:
            yield
        finally:
            self._spent += self._clock.now() - began

    def times(self) -> GuardTimes:
        """Return the times of this rank since the start, and of the last check."""
        elapsed = self._clock.now() - self._began
        return GuardTimes(
            spent=self._spent,
            check=self._spent - self._before,
            elapsed=elapsed,
            step=(elapsed - self._spent) / max(1, self._steps),
        )

    def plan(self, step: int, ranks: Sequence[GuardTimes], *, more: float = 0.0) -> None:
        """Plan the next check after `step`, from the times of all ranks. Collective.

        The slowest rank decides: all must come to the next check at the same step. The check took
        `more` seconds after the ranks had measured their times.
        """
        self._spent += more
        times = [replace(each, spent=each.spent + more, check=each.check + more) for each in ranks]
        wait = max(steps_to_next_check(each, self._budget) for each in times)
        self.due = step + self._world.broadcast(wait)  # `more` differs between ranks

    def summary(self) -> dict[str, Plain]:
        """Return the number of checks and their time; empty without a check."""
        if not self._checks:
            return {}
        elapsed = self._clock.now() - self._began
        return {"checks": self._checks, "seconds": self._spent, "of": elapsed}
