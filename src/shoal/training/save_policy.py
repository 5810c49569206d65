"""The intervals between saves, the running save, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.checkpoint import AnyPath, BackgroundSave, Checkpoints
from shoal.distributed.deadline import Deadline
from shoal.distributed.env_vars import warn_of_kill
from shoal.distributed.failure import is_by_peer
from shoal.distributed.world import World
from shoal.telemetry.events import Events
from shoal.telemetry.stop_time import stopping_seconds
from shoal.util.clock import CLOCK, Clock, run_within
from shoal.util.errors import CheckpointError
from shoal.util.mounts import mount_of

FIRST_COST = 1.0
"""The assumed seconds that a save blocks training, until one has been measured."""
_LOOK = 1.0
SLOW_WAIT = 5.0
"""Seconds of a wait for a running save after which rank 0 names the disk."""
LAST_WAIT = 300.0
"""Seconds that a run which ends with an error waits for a running save."""


@dataclass(frozen=True, kw_only=True)
class YoungDaly:
    """The save interval that minimizes the time lost to saves and to steps repeated after failures.

    The cost of a save is the measured time for which it blocks training (Young 1974; Daly 2006,
    equation 37).

    Args:
        mtbf: Mean time between failures of the job, a positive timedelta: that of one node divided by
            the number of nodes.

    Raises:
        CheckpointError: If `mtbf` is not a positive timedelta.

    Examples:
        >>> from datetime import timedelta
        >>> policy = shoal.YoungDaly(mtbf=timedelta(hours=8))  # run.tick(every=policy)
        >>> round(policy.seconds(cost=2.0))
        338
    """

    mtbf: timedelta

    def __post_init__(self) -> None:
        if not isinstance(self.mtbf, timedelta) or not self.mtbf > timedelta(0):
            raise CheckpointError(
                given=f"shoal.YoungDaly(mtbf={self.mtbf})",
                found="the mean time between failures is a positive timedelta",
                fix="shoal.YoungDaly(mtbf=timedelta(hours=8))",
            )

    def seconds(self, cost: float) -> float:
        """Return the seconds of training between two saves.

        Args:
            cost: Seconds for which a save blocks training.

        Returns:
            The interval in seconds, at most `mtbf`.
        """
        mean = self.mtbf.total_seconds()
        if cost >= 2 * mean:
            return mean
        part = cost / (2 * mean)
        return math.sqrt(2 * cost * mean) * (1 + math.sqrt(part) / 3 + part / 9) - cost


Every = int | timedelta | YoungDaly
"""The interval between saves: optimizer steps, time, or a YoungDaly."""


def check_every(every: object, call: str) -> Every:
    """Return `every` if it is a valid interval; raises CheckpointError otherwise.

    `call` is the user's call, with `{}` in place of the value.
    """
    if isinstance(every, YoungDaly):
        return every
    if isinstance(every, timedelta) and every > timedelta(0):
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every
    raise CheckpointError(
        given=call.format(repr(every)),
        found="the interval between saves is a number of steps, 1 or more, or a time",
        fix=f"use {call.format(500)}, {call.format('timedelta(minutes=10)')} or "
        f"{call.format('shoal.YoungDaly(mtbf=timedelta(hours=8))')}",
    )


@dataclass(frozen=True)
class RunningSave:
    """A running save in a directory, its step, and the seconds for which it blocked training."""

    job: BackgroundSave[AnyPath]
    directory: AnyPath
    step: int
    blocked: float


class SavePolicy:
    """The saves of a run: at most one runs at a time, and its result is reported.

    `saved` gets the path and the step of each complete checkpoint. With `must`, a failed save ends the
    run: at a tick on which all ranks agree, at the next save, or when the run is closed.
    """

    def __init__(
        self,
        world: World,
        events: Events,
        directory: Path,
        *,
        saved: Callable[[str, int], None],
        must: bool,
        clock: Clock = CLOCK,
    ) -> None:
        self._world = world
        self._saved = saved
        self._events = events
        self._clock = clock
        self._must = must
        self._saving: RunningSave | None = None
        self._failure: CheckpointError | None = None
        self._every: Every | None = None
        self._deadline = Deadline(None, world, clock)
        self._cost, self._took = FIRST_COST, 0.0
        self._warned = False
        if world.is_rank_zero:
            self._warn(stopping_seconds(directory))

    def due(self, every: Every, step: int) -> bool:
        """Return whether to save after this optimizer step, the same on all ranks.

        Collective if the interval is a time.
        """
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
    ) -> BackgroundSave[AnyPath]:
        """Start a save of the contents that `gather` returns; see `RunState.take`. Collective.

        With `must`, raises CheckpointError if an earlier save failed.
        """
        begun = self._clock.now()
        self.hear(wait=True)
        self.check()
        job = checkpoints.start(step, **gather())
        blocked = self._clock.now() - begun
        self._saving = RunningSave(job, checkpoints.directory, step, blocked)
        self._cost = blocked
        self._rewind()
        return job

    def hear(self, *, wait: bool = False, within: float | None = None) -> None:
        """Report the result of the running save, if it has ended.

        With `wait`, wait until it has, but no longer than `within` seconds.
        """
        saving = self._saving
        if saving is not None and wait:
            self._join(saving, within)
        if saving is None or not saving.job.done:
            return
        self._saving = None
        try:
            path = saving.job.wait()
        except CheckpointError as error:
            self._failure = error
            self._events.write("save_failed", {"step": saving.step, "error": error.found})
            unsaved = f"the checkpoint of step {saving.step:,} was not saved"
            if is_by_peer(error):  # the next collective fails too
                unsaved = f"the checkpoint of step {saving.step:,} may be incomplete"
                self._world.print(f"shoal: {error.found}; {unsaved}")
            elif not self._must:
                self._world.print(f"shoal: {unsaved}: {error.found}; training continues ({error.fix})")
            return
        self._took = saving.job.seconds
        seconds = saving.blocked + saving.job.seconds
        self._warn(seconds)
        self._events.write(
            "save",
            {
                "step": saving.step,
                "seconds": seconds,
                "blocked": saving.blocked,
                "path": str(path),
            },
        )
        self._saved(str(path), saving.step)

    def _warn(self, seconds: float | None) -> None:
        """Print on rank 0, once, that the launcher would kill ranks before they have saved."""
        if self._world.is_rank_zero and not self._warned:
            warning = warn_of_kill(self._world.placement.launcher, seconds)
            self._warned = bool(warning)
            if warning:
                self._world.print(warning)

    def _join(self, saving: RunningSave, within: float | None) -> None:
        """Wait for a save for at most `within` seconds, and name its disk if that is slow."""
        first = SLOW_WAIT if within is None else min(SLOW_WAIT, within)
        saving.job.join(first)
        if saving.job.done:
            return
        self._world.print(
            f"shoal: training has waited {first:g} s for the save of step {saving.step:,} in "
            f"{saving.directory}{_mounted(saving.directory)}, whose disk is slow: save less often, or "
            "use another disk"
        )
        saving.job.join(None if within is None else within - first)

    def forget(self, job: BackgroundSave[AnyPath]) -> None:
        """Do not report a save again whose result its caller has received."""
        if self._saving is not None and self._saving.job is job:
            if job.failed:
                self._saving = None
            self.hear()

    @property
    def failed(self) -> bool:
        """True with `must`, if this rank knows of a failed save."""
        return self._must and self._failure is not None

    def check(self) -> None:
        """Raise the error of a failed save, with `must`."""
        failure, self._failure = self._failure, None
        if failure is not None and self._must:
            raise failure

    def _rewind(self) -> None:
        every = self._every
        seconds = None
        if isinstance(every, timedelta):
            seconds = every.total_seconds()
        elif isinstance(every, YoungDaly):
            # Any sooner, the previous save would still be running.
            seconds = max(every.seconds(self._cost), self._took)
        self._deadline = Deadline(seconds, self._world, self._clock)


def _mounted(directory: AnyPath) -> str:
    """Return the file system of a directory, for messages; empty if that is remote or not known."""
    if isinstance(directory, Path):
        with suppress(OSError):  # of which TimeoutError is one: the disk may hang
            return f" ({' at '.join(run_within(_LOOK, lambda: mount_of(directory)))})"
    return ""
