"""A thread that samples a rank periodically, within a limited fraction of the time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from shoal.util.clock import CLOCK

_KEPT = 1000
"""Maximum number of notes that are kept; the oldest are dropped."""
_JOIN_SECONDS = 5.0

Note = tuple[str, dict[str, Any]]
"""The kind of an event and its fields."""

Run = Callable[[], Note | None] | Callable[[], None]


@dataclass(kw_only=True)
class PeriodicTask:
    """A job that runs every `seconds`, or less often if it would take more than `share` of the time.

    `run` returns the resulting event, if any. With `jitter` the times are random, so that they do not
    correlate with steps. A job that `ends` runs once more at the end.
    """

    name: str
    seconds: float
    run: Run
    share: float = 0.0005
    jitter: bool = False
    ends: bool = False
    due: float = field(default=0.0, init=False)


class UsageSampler:
    """A daemon thread that runs jobs until `stop`, and keeps their events until `taken` returns them.

    If a job fails, `say` reports it once, and the job is not run again.
    """

    def __init__(
        self, jobs: Sequence[PeriodicTask], *, step: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._jobs = list(jobs)
        self._step = step
        self._say = say
        self._notes: deque[Note] = deque(maxlen=_KEPT)
        # A separate generator: the global ones belong to training.
        self._random = Random(os.getpid())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal sampler", daemon=True)
        now = CLOCK.now()
        for job in self._jobs:
            job.due = now + self._period(job)
        self._thread.start()

    def taken(self) -> Iterator[Note]:
        """Yield the events since the last call."""
        while self._notes:
            yield self._notes.popleft()

    def let_go(self) -> None:
        """Let the thread end by itself."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread, and run the jobs once more that run at the end."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if not self._thread.is_alive():  # in a process that was forked from this one
            return
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            for job in [job for job in self._jobs if job.ends]:
                self._do(job)

    def _run(self) -> None:
        while self._jobs:
            job = min(self._jobs, key=lambda job: job.due)
            if CLOCK.wait(self._stopped, max(0.0, job.due - CLOCK.now())):
                return
            begun = CLOCK.thread_seconds()
            self._do(job)
            # This time matters in a process with few cores, or one that hardly computes.
            spent = CLOCK.thread_seconds() - begun
            job.due = CLOCK.now() + max(self._period(job), spent / job.share)

    def _period(self, job: PeriodicTask) -> float:
        return job.seconds * (self._random.uniform(0.5, 1.5) if job.jitter else 1.0)

    def _do(self, job: PeriodicTask) -> None:
        try:
            note = job.run()
        except Exception as error:  # a failed sample must not fail the run
            self._jobs.remove(job)
            self._say(f"shoal: {job.name} is no longer recorded: {type(error).__name__}: {error}")
            return
        if note is not None:
            kind, fields = note
            self._notes.append((kind, {"t": round(CLOCK.wall(), 6), "step": self._step(), **fields}))


def noting(kind: str, fields: Callable[[], Mapping[str, Any]]) -> Callable[[], Note]:
    """Return a job that records the fields as an event of one kind."""
    return lambda: (kind, dict(fields()))
