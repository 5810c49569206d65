"""Work with a time limit, in threads: for what may hang where nothing can interrupt it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T]) -> Future[T]:
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
    return start(work).result(timeout=seconds)


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
