"""What other ranks and threads send to a rank's main thread while it takes part in a turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from shoal.errors import ShoalError

LOOK_SECONDS = 1.0
"""After so long without a message a rank looks whether the others live."""


class Arrived(NamedTuple):
    """A rank is there, or can't be because of an error."""

    rank: int
    error: ShoalError | None


class Job(NamedTuple):
    """A micro-batch to take through this rank's stage; `reply` gets what comes out."""

    micro: int
    received: tuple[Any, ...]
    reply: Future[Any]


class Carried(NamedTuple):
    """A micro-batch has been through all stages, and back, or not."""

    micro: int
    value: Any
    error: Exception | None


class Over(NamedTuple):
    """The turn is over for all, with an error of some rank or without."""

    error: ShoalError | None


Message: TypeAlias = Arrived | Job | Carried | Over


class Inbox:
    """Messages by the number of the turn that they belong to, which this rank may not have begun.

    `look` is called where none comes for a while.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self.turn = 0
        self._look = look
        self._over = 0
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[Message]] = {}

    def begin(self) -> int:
        """The next turn; its number."""
        self.turn += 1
        return self.turn

    def end(self) -> list[Message]:
        """The turn is over; the messages that nobody has received."""
        left: list[Message] = []
        with self._lock:
            self._over = self.turn
            queue = self._queues.pop(self.turn, None)
        while queue is not None and not queue.empty():
            left.append(queue.get())
        return left

    def post(self, turn: int, message: Message) -> bool:
        """Send a message; False if that turn is over. From any thread."""
        with self._lock:
            if turn <= self._over:
                return False
            self._queues.setdefault(turn, SimpleQueue()).put(message)
            return True

    def receive(self) -> Message:
        """The next message of this turn."""
        with self._lock:
            queue = self._queues.setdefault(self.turn, SimpleQueue())
        while True:
            try:
                return queue.get(timeout=LOOK_SECONDS)
            except Empty:
                self._look()


class Line:
    """Jobs done in the order of their micro-batches, in whatever order they come."""

    def __init__(self, micros: range) -> None:
        self._micros = iter(micros)
        self._next = next(self._micros, None)
        self._waiting: dict[int, Job] = {}

    @property
    def over(self) -> bool:
        """Whether no job is to come any more."""
        return self._next is None

    def ready(self, job: Job) -> Iterator[Job]:
        """The jobs whose turn it is, now that `job` is there too."""
        self._waiting[job.micro] = job
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next = next(self._micros, None)

    def left(self) -> list[Job]:
        """Those that were never done."""
        return list(self._waiting.values())
