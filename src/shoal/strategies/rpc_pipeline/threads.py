"""Threads that carry micro-batches through stages on other ranks."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Carriers:
    """Threads that each carry one micro-batch after the other, begun in their order.

    `carry` is called with the number of one, and `done` with its value or the error it ended with.
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
        """Begin, with so many micro-batches under way at once."""
        for _ in range(min(threads, len(self._left))):
            # Nobody waits for one of them that waits for a rank which died.
            threading.Thread(target=self._run, name="shoal carrier", daemon=True).start()

    def stop(self) -> None:
        """Begin no other micro-batch, and let none wait for its turn."""
        with self._condition:
            self._left.clear()
            self._stopped = True
            self._condition.notify_all()

    @contextlib.contextmanager
    def turn_of(self, number: int) -> Iterator[None]:
        """Inside of it is one micro-batch at a time, in their order. Raises RuntimeError if stopped."""
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
