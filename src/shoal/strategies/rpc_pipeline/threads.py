"""Threads that run micro-batches through stages on other ranks."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class MicroBatchThreads:
    """Threads that each run one micro-batch after the other, started in order.

    `carry` is called with the number of a micro-batch, and `done` with its value or error.
    """

    def __init__(
        self,
        count: int,
        carry: Callable[[int], Any],
        done: Callable[[int, Any, Exception | None], object],
    ) -> None:
        self._left = deque(range(count))
        self._carry, self._done = carry, done
        self._condition = threading.Condition()
        self._next = 0
        self._stopped = False

    def start(self, threads: int) -> None:
        """Start this many threads, each with one micro-batch at a time."""
        for _ in range(min(threads, len(self._left))):
            # Daemons, so that the process does not wait for a thread that waits for a dead rank.
            threading.Thread(target=self._run, name="shoal carrier", daemon=True).start()

    def stop(self) -> None:
        """Start no other micro-batch, and wake those that wait for their turn."""
        with self._condition:
            self._left.clear()
            self._stopped = True
            self._condition.notify_all()

    @contextlib.contextmanager
    def turn_of(self, number: int) -> Iterator[None]:
        """Admit one micro-batch at a time, in order. Raise RuntimeError if stopped."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._next == number)
            if self._stopped:
                raise RuntimeError("stopped")
        yield
        with self._condition:
            self._next += 1
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            try:
                number = self._left.popleft()
            except IndexError:
                return
            try:
                value = self._carry(number)
            except Exception as error:
                self._done(number, None, error)
                return
            self._done(number, value, None)
