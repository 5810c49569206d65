"""What other ranks and threads send to a rank's main thread while it takes part in a turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch

from shoal.data.micro import Micro
from shoal.strategies.task import Task
from shoal.util.errors import ShoalError

LOOK_SECONDS = 1.0
"""After so long without a message a rank looks whether the others live."""


@dataclass(frozen=True, kw_only=True)
class TurnWork:
    """The micro-batches of a turn; `factor` is what losses are multiplied by, None for inference."""

    task: Task
    micros: Sequence[Micro]
    seed: int
    autocast: torch.dtype | None
    factor: float | None


class Arrived(NamedTuple):
    """A rank is there, or can't be because of an error."""

    rank: int
    error: ShoalError | None


class ForwardRequest(NamedTuple):
    """A micro-batch to take through this rank's stage; `reply` gets what comes out."""

    micro: int
    received: tuple[Any, ...]
    reply: Future[Any]


class Backward(NamedTuple):
    """The backward of a micro-batch through this rank's stage begins, or is over."""

    micro: int
    over: bool


class Carried(NamedTuple):
    """A micro-batch has been through all stages, and back, or not."""

    micro: int
    value: Any
    error: Exception | None


class Over(NamedTuple):
    """The turn is over for all, with an error of some rank or without."""

    error: ShoalError | None


Message: TypeAlias = Arrived | ForwardRequest | Backward | Carried | Over


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

    def lasts(self, turn: int) -> bool:
        """Whether that turn is not over yet. From any thread."""
        with self._lock:
            return turn > self._over

    def post(self, turn: int, message: Message) -> bool:
        """Send a message; False if that turn is over. From any thread."""
        with self._lock:
            if turn <= self._over:
                return False
            self._queues.setdefault(turn, SimpleQueue()).put(message)
            return True

    def receive(self, *, wait: bool = True) -> Message | None:
        """The next message of this turn; without `wait` None if there is none yet."""
        with self._lock:
            queue = self._queues.setdefault(self.turn, SimpleQueue())
        while True:
            try:
                return queue.get(block=wait, timeout=LOOK_SECONDS)
            except Empty:
                if not wait:
                    return None
                self._look()


class ForwardQueue:
    """Jobs in the order of their micro-batches, in whatever order they come; none during a backward.

    A rank computes on what its process was given, so a forward beside a backward would only delay what
    the stages before wait for (as in the schedule 1F1B of Narayanan et al. 2019).
    """

    def __init__(self, micros: range) -> None:
        self._order = deque(micros)
        self._waiting: dict[int, ForwardRequest] = {}
        self._backwards: set[int] = set()
        self._over: set[int] = set()

    @property
    def backward(self) -> bool:
        """Whether a backward is under way."""
        return bool(self._backwards)

    @property
    def ready(self) -> bool:
        """Whether there is a job to do now."""
        return not self._backwards and bool(self._order) and self._order[0] in self._waiting

    def add(self, job: ForwardRequest) -> None:
        """A job has come."""
        self._waiting[job.micro] = job

    def take(self) -> ForwardRequest:
        """The job that is ready."""
        return self._waiting.pop(self._order.popleft())

    def mark(self, micro: int, *, over: bool) -> None:
        """The backward of a micro-batch begins, or is over for good."""
        if over:
            self._over.add(micro)
        else:
            self._backwards.add(micro)
        self._backwards -= self._over

    def left(self) -> list[ForwardRequest]:
        """Those that were never done."""
        return list(self._waiting.values())
