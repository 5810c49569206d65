"""The thread that looks at a rank from the side, now and then, and never costs more than its share."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

_KEPT = 1000
"""Notes that nobody takes; the oldest are dropped."""
_JOIN_SECONDS = 5.0

Note = tuple[str, dict[str, Any]]
"""The kind of an event and its fields."""

Run = Callable[[], Note | None] | Callable[[], None]


@dataclass(kw_only=True)
class PeriodicTask:
    """Something done every `seconds`, or more rarely where it would take more than `share` of time.

    `run` returns the event that comes of it, if any. With `jitter` the times are random, so that they
    have nothing to do with those of steps. One that `ends` is done once more when all stops.
    """

    name: str
    seconds: float
    run: Run
    share: float = 0.0005
    jitter: bool = False
    ends: bool = False
    due: float = field(default=0.0, init=False)


class UsageSampler:
    """Runs jobs on a daemon thread until `stop`; what they note waits for `taken`.

    A job that fails is told once, through `say`, and not run again.
    """

    def __init__(
        self, jobs: Sequence[PeriodicTask], *, step: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._jobs = list(jobs)
        self._step = step
        self._say = say
        self._notes: deque[Note] = deque(maxlen=_KEPT)
        # Of its own: the global generators belong to the training.
        self._random = Random(os.getpid())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal sampler", daemon=True)
        now = time.perf_counter()
        for job in self._jobs:
            job.due = now + self._period(job)
        self._thread.start()

    def taken(self) -> Iterator[Note]:
        """What has been noted since the last call of this."""
        while self._notes:
            yield self._notes.popleft()

    def let_go(self) -> None:
        """Have the thread end by itself."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread, and have the jobs look once more that are to be done at the end."""
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
            if self._stopped.wait(max(0.0, job.due - time.perf_counter())):
                return
            begun = time.thread_time()
            self._do(job)
            # In a process that has few cores, or one that hardly computes, all this counts.
            spent = time.thread_time() - begun
            job.due = time.perf_counter() + max(self._period(job), spent / job.share)

    def _period(self, job: PeriodicTask) -> float:
        return job.seconds * (self._random.uniform(0.5, 1.5) if job.jitter else 1.0)

    def _do(self, job: PeriodicTask) -> None:
        try:
            note = job.run()
        except Exception as error:  # a run does not fail because it could not be looked at
            self._jobs.remove(job)
            self._say(f"shoal: {job.name} is recorded no more: {type(error).__name__}: {error}")
            return
        if note is not None:
            kind, fields = note
            self._notes.append((kind, {"t": round(time.time(), 6), "step": self._step(), **fields}))


def noting(kind: str, fields: Callable[[], Mapping[str, Any]]) -> Callable[[], Note]:
    """What a job runs whose fields are an event of one kind."""
    return lambda: (kind, dict(fields()))
