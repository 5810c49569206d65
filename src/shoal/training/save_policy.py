"""When a run is saved, what is under way, and what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shoal.checkpoint import AnyPath, BackgroundSave, Checkpoints, Tree
from shoal.distributed.deadline import Deadline
from shoal.distributed.world import World
from shoal.telemetry.events import Events
from shoal.util.errors import CheckpointError

FIRST_COST = 1.0
"""Seconds that a save is taken to cost before one has been measured."""
LAST_WAIT = 300.0
"""Seconds that a run which ends by an error gives the save that is under way."""


@dataclass(frozen=True, kw_only=True)
class YoungDaly:
    """Save so often that saves, and what failures make one repeat, cost least time together.

    `mtbf` is the mean time between failures of the whole job: that of a node divided by how many
    there are. A save costs what it keeps the step waiting, which is measured. (Young 1974; Daly 2006,
    equation 37.)

        run.tick(every=shoal.YoungDaly(mtbf=timedelta(hours=8)))
    """

    mtbf: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.mtbf, timedelta) or not self.mtbf > timedelta(0):
            raise CheckpointError(
                given=f"shoal.YoungDaly(mtbf={self.mtbf})",
                found="the mean time between failures is a timedelta, and more than none",
                fix="shoal.YoungDaly(mtbf=timedelta(hours=8))",
            )

    def seconds(self, cost: float) -> float:
        """How many seconds of training lie between saves that cost `cost` seconds each."""
        mean = self.mtbf.total_seconds()
        if cost >= 2 * mean:
            return mean
        part = cost / (2 * mean)
        return math.sqrt(2 * cost * mean) * (1 + math.sqrt(part) / 3 + part / 9) - cost


Every = int | timedelta | YoungDaly
"""After how many optimizer steps, or how much time, a run is saved."""


def check_every(every: object, call: str) -> Every:
    """`every` if saves can follow it, else CheckpointError; `call` is the call, with a `{}` for it."""
    if isinstance(every, YoungDaly):
        return every
    if isinstance(every, timedelta) and every > timedelta(0):
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every
    raise CheckpointError(
        given=call.format(repr(every)),
        found="a checkpoint is saved every so many steps, 1 or more, or after some time",
        fix=f"{call.format(500)}, or in place of the number timedelta(minutes=10), or "
        "shoal.YoungDaly(mtbf=timedelta(hours=8))",
    )


@dataclass(frozen=True)
class Saving:
    """A save under way, of which step, and for how many seconds it kept training waiting."""

    job: BackgroundSave[AnyPath]
    step: int
    blocked: float


class SavePolicy:
    """The saves of a run: one is under way at a time, and what became of it is told.

    Where `must` is set, one that failed ends the run: at a tick on which all ranks agree, at the next
    save, or when the run is closed.
    """

    def __init__(self, world: World, events: Events, *, must: bool) -> None:
        self._world = world
        self._events = events
        self._must = must
        self._saving: Saving | None = None
        self._failure: CheckpointError | None = None
        self._every: Every | None = None
        self._deadline = Deadline(None, world)
        self._cost, self._took = FIRST_COST, 0.0

    def due(self, every: Every, step: int) -> bool:
        """Whether to save after this optimizer step, on all ranks alike. Collective if time decides."""
        if isinstance(every, int):
            return step % every == 0
        if every != self._every:
            self._every = every
            self._rewind()
        return self._deadline.over()

    def start(
        self,
        checkpoints: Checkpoints,
        step: int,
        gather: Callable[[], Mapping[str, Any]],
        *,
        join: bool,
    ) -> BackgroundSave[AnyPath]:
        """Begin a save of what `gather` returns: "state", "rank_state" and "info". Collective.

        Raises CheckpointError where one before has failed, and had not to.
        """
        begun = time.perf_counter()
        self.hear(wait=True)
        self.check()
        parts: Mapping[str, Tree] = gather()
        job = checkpoints.start(step, **parts, join=join)
        blocked = time.perf_counter() - begun
        self._saving = Saving(job, step, blocked)
        self._cost = blocked
        self._rewind()
        return job

    def hear(self, *, wait: bool = False, within: float | None = None) -> None:
        """Tell what became of the save under way, if it has ended.

        With `wait` until it has, but no longer than `within` seconds.
        """
        saving = self._saving
        if saving is not None and wait:
            saving.job.join(within)
        if saving is None or not saving.job.done:
            return
        self._saving = None
        try:
            path = saving.job.wait()
        except CheckpointError as error:
            self._failure = error
            self._events.write("save_failed", {"step": saving.step, "error": error.found})
            if not self._must:
                self._world.print(
                    f"shoal: the checkpoint of step {saving.step:,} was not saved: {error.found}; "
                    f"training goes on ({error.fix})"
                )
            return
        self._took = saving.job.seconds
        self._events.write(
            "save",
            {
                "step": saving.step,
                "seconds": saving.blocked + saving.job.seconds,
                "blocked": saving.blocked,
                "path": str(path),
            },
        )

    def forget(self, job: BackgroundSave[AnyPath]) -> None:
        """A save whose outcome its caller has heard is not told again."""
        if self._saving is not None and self._saving.job is job:
            if job.failed:
                self._saving = None
            self.hear()

    @property
    def failed(self) -> bool:
        """Whether this rank has heard of a save that failed and had not to."""
        return self._must and self._failure is not None

    def check(self) -> None:
        """Raise the error of a save that failed and had not to."""
        failure, self._failure = self._failure, None
        if failure is not None and self._must:
            raise failure

    def _rewind(self) -> None:
        every = self._every
        seconds = None
        if isinstance(every, timedelta):
            seconds = every.total_seconds()
        elif isinstance(every, YoungDaly):
            # Sooner, the one before would still be under way.
            seconds = max(every.seconds(self._cost), self._took)
        self._deadline = Deadline(seconds, self._world)
