"""The watchdog of a world: time limits of waits, the watch, and the comparison of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shoal._torch import c10d
from shoal.distributed.watchdog.diagnosis import BUSY_SECONDS, WaitLimits
from shoal.distributed.watchdog.mismatch import CollectiveMatcher
from shoal.distributed.watchdog.watch import Watch
from shoal.telemetry.flight_recorder import RecordingGroup
from shoal.util.errors import LaunchError

MARGIN_SECONDS = 60.0
"""Seconds by which torch's own timeout is longer than the watch's, so that every rank is asked first.
"""
CHECKED_STEPS = 3
"""Number of steps, from the first one, in which ranks compare each collective before they begin it."""


class Watchdog:
    """Limits the time for which ranks wait for each other, and ends all if one does not arrive.

    `group` is None in a world of size 1, which needs no watchdog. `address` is where other ranks reach
    this one, and `directory` returns where a report of a hang is written, None being the directory for
    temporary files. The constructor is collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        limits: WaitLimits,
        address: str,
        directory: Callable[[], Path | None],
    ) -> None:
        self.limits = limits
        self.steps = 0
        """Number of steps that a world of several ranks has begun; equal on ranks that step together.
        """
        self._preparing = 0
        self._matching: CollectiveMatcher | None = None
        self._watch: Watch | None = None
        if group is None:
            return
        self._matching = matching = CollectiveMatcher(group.rank())
        if isinstance(group, RecordingGroup):
            group.compare(matching.check)
        self._watch = Watch(
            group,
            limits=limits,
            address=address,
            directory=directory,
            checked=lambda: matching.current,
        )
        self.extend_torch_timeouts()

    @property
    def active(self) -> bool:
        """Whether the world has a process group, in which ranks can wait."""
        return self._watch is not None

    @property
    def limit(self) -> float:
        """The number of seconds that a wait may last now."""
        preparing = self._preparing or not self.steps
        return self.limits.prepare if preparing else self.limits.step

    def begin_step(self) -> None:
        """Count a step. From the first one on, a wait has the time limit of steps."""
        if self._matching is None:
            return
        self.steps += 1
        if self.steps == 1:
            self._apply_limit()
            self.extend_torch_timeouts()
        elif self.steps > CHECKED_STEPS and not self._matching.found:
            self._matching.stop()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Apply the time limit of preparation inside; see `World.preparing`."""
        self._preparing += 1
        self._apply_limit()
        try:
            yield
        finally:
            self._preparing -= 1
            self._apply_limit()

    def answered(self) -> None:
        """Note that another rank has answered a call of this one, whose wait thus makes progress."""
        if self._watch is not None:
            self._watch.answered()

    def gone(self, ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
        """Return those of `ranks` that have ended; see `Watch.gone`."""
        return set() if self._watch is None else self._watch.gone(ranks, unreachable=unreachable)

    @contextlib.contextmanager
    def explained(self, during: str = "") -> Iterator[None]:
        """Raise LaunchError with the rank that has ended in place of torch's error because of that."""
        try:
            yield
        except RuntimeError as error:
            explained = None if self._watch is None else self._watch.explain(error, during)
            if explained is None:
                raise
            raise explained from None

    def explain_end(self, error: BaseException) -> LaunchError | None:
        """Return the error to raise in place of one that ends this rank; see `Watch.explain_end`."""
        return None if self._watch is None else self._watch.explain_end(error)

    def stop_comparing(self) -> None:
        """Stop the comparison of collectives, which waits for all ranks."""
        if self._matching is not None:
            self._matching.stop()

    def extend_torch_timeouts(self) -> None:
        """Set the timeout of each process group above the watch's limits, which then act first."""
        watched = max(self.limits.step, self.limits.prepare, BUSY_SECONDS)
        longest = timedelta(seconds=watched + MARGIN_SECONDS)
        for group in c10d.process_groups():
            if isinstance(group, RecordingGroup):
                group.allow(longest.total_seconds())
            else:
                c10d.set_timeout(group, longest)

    def leave(self) -> None:
        """Stop. Other ranks then find that this one has left the world."""
        if self._watch is not None:
            self._watch.leave()
        self.stop_comparing()

    def _apply_limit(self) -> None:
        if self._watch is not None:
            self._watch.limit = self.limit
