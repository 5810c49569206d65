"""Clocks and time limits. Only this module of Shoal reads a clock or sleeps.

Objects that measure time, wait or time out take a `Clock`, which their tests advance by hand.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Final, Protocol, TypeVar


class Clock(Protocol):
    """A clock to read and to wait on; tests replace it."""

    def now(self) -> float:
        """Return seconds that never go back, the same in all processes of a machine."""

    def now_ns(self) -> int:
        """Return `now` in nanoseconds."""

    def wall(self) -> float:
        """Return the seconds since 1970, by a clock that may be set."""

    def sleep(self, seconds: float, /) -> None:
        """Return after this many seconds."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Return whether the event is set, after this many seconds at the latest."""


class SystemClock:
    """The clock of the machine."""

    # time.monotonic reads the same clock as time.perf_counter, with the same resolution.
    now = staticmethod(time.monotonic)
    now_ns = staticmethod(time.monotonic_ns)
    sleep = staticmethod(time.sleep)
    process_seconds = staticmethod(time.process_time)
    """The CPU seconds of this process."""
    thread_seconds = staticmethod(time.thread_time)
    """The CPU seconds of this thread."""

    wall_ns = staticmethod(time.time_ns)
    """Nanoseconds since 1970."""

    def wall(self) -> float:
        """Return the seconds since 1970; looked up at each call, since `jump_clock` replaces it."""
        return time.time()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Return whether the event is set, after this many seconds at the latest."""
        return event.wait(seconds)


CLOCK: Final = SystemClock()


def local_time(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return seconds since 1970 as a date and time in the local time zone."""
    return time.strftime(form, time.localtime(seconds))


def utc_time(seconds: float, form: str) -> str:
    """Return seconds since 1970 as a date and a time in UTC."""
    return time.strftime(form, time.gmtime(seconds))


def utc_now() -> datetime:
    """Return the date and time of the machine's clock, in UTC."""
    return datetime.now(UTC)


def jump_clock(seconds: float) -> None:
    """Change the result of time.time() in this process. Other functions and programs do not change."""
    read = time.time
    setattr(time, "time", lambda: read() + seconds)  # noqa: B010


T = TypeVar("T")


def start_work(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread, and return the future of its result.

    A thread that a dead file system holds cannot be ended. It ends with the process.
    """
    future: Future[T] = Future()
    try:
        threading.Thread(target=_run, args=(work, future), daemon=True).start()
    except RuntimeError:  # Python 3.12 starts no thread when it exits
        _run(work, future)
    return future


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; TimeoutError if it takes longer."""
    return start_work(work).result(timeout=seconds)


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


_AT_ONCE = 0.002
"""Seconds in which it only yields to other threads between polls, since most waits are shorter."""
_SHARE = 100
"""Then it sleeps a hundredth of the time it has waited, so that it overshoots by 1 % at most."""
_LONGEST = 0.001


class PollBackoff:
    """Pauses between polls, of growing length. `least` is the length of the first ones, in seconds."""

    def __init__(self, least: float = 0.0) -> None:
        self._begun = CLOCK.now()
        self._least = least

    def pause(self) -> None:
        """Sleep until the next poll. Signal handlers run during the sleep."""
        waited = CLOCK.now() - self._begun
        if not self._least and waited < _AT_ONCE:
            os.sched_yield()
        else:
            CLOCK.sleep(min(max(waited / _SHARE, self._least), _LONGEST))
