"""Messages of other ranks and threads to the main thread of a rank during a turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import torch

from shoal.data.micro import MicroBatch
from shoal.strategies.task import Task
from shoal.util.errors import ShoalError

LOOK_SECONDS = 1.0
"""Interval after which a rank without messages checks whether the others are alive."""


@dataclass(frozen=True, kw_only=True)
class TurnWork:
    """The micro-batches of a turn. `factor` multiplies the losses; None means inference."""

    task: Task
    micros: Sequence[MicroBatch]
    seed: int
    autocast: torch.dtype | None
    factor: float | None


class ReadyMessage(NamedTuple):
    """Message: a rank is ready, or has an error."""

    rank: int
    error: ShoalError | None


class ForwardRequest(NamedTuple):
    """Message: run a micro-batch through this rank's stage. `reply` gets the output."""

    micro: int
    received: tuple[Any, ...]
    reply: Future[Any]


class BackwardMessage(NamedTuple):
    """Message: the backward of a micro-batch through this rank's stage begins or has ended."""

    micro: int
    over: bool


class MicroBatchDone(NamedTuple):
    """Message: a micro-batch has run through all stages and back, or failed."""

    micro: int
    value: Any
    error: Exception | None


class TurnDone(NamedTuple):
    """Message: the turn is over for all ranks, with or without an error."""

    error: ShoalError | None


Message: TypeAlias = ReadyMessage | ForwardRequest | BackwardMessage | MicroBatchDone | TurnDone


class Inbox:
    """Messages by the number of their turn, which this rank may not have begun.

    `look` is called if no message arrives for a while.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self.turn = 0
        self._look = look
        self._over = 0
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[Message]] = {}

    def begin(self) -> int:
        """Begin the next turn, and return its number."""
        self.turn += 1
        return self.turn

    def end(self) -> list[Message]:
        """End the turn, and return the messages that were not received."""
        left: list[Message] = []
        with self._lock:
            self._over = self.turn
            queue = self._queues.pop(self.turn, None)
        while queue is not None and not queue.empty():
            left.append(queue.get())
        return left

    def lasts(self, turn: int) -> bool:
        """Return whether that turn is not over yet. From any thread."""
        with self._lock:
            return turn > self._over

    def post(self, turn: int, message: Message) -> bool:
        """Send a message. Return False if that turn is over. From any thread."""
        with self._lock:
            if turn <= self._over:
                return False
            self._queues.setdefault(turn, SimpleQueue()).put(message)
            return True

    def receive(self, *, wait: bool = True) -> Message | None:
        """Return the next message of this turn; without `wait`, None if there is none yet."""
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
    """Queue of forward passes in the order of the micro-batches; they wait during a backward pass.

    A rank has a fixed number of cores, so a forward pass during a backward pass would only delay the
    gradients for which earlier stages wait (as in the schedule 1F1B of Narayanan et al. 2019).
    """

    def __init__(self, micros: range) -> None:
        self._order = deque(micros)
        self._waiting: dict[int, ForwardRequest] = {}
        self._backwards: set[int] = set()
        self._over: set[int] = set()

    @property
    def backward(self) -> bool:
        """Whether a backward pass is running."""
        return bool(self._backwards)

    @property
    def ready(self) -> bool:
        """Whether a forward pass can run now."""
        return not self._backwards and bool(self._order) and self._order[0] in self._waiting

    def add(self, job: ForwardRequest) -> None:
        """Add a request."""
        self._waiting[job.micro] = job

    def take(self) -> ForwardRequest:
        """Remove and return the request that is ready."""
        return self._waiting.pop(self._order.popleft())

    def mark(self, micro: int, *, over: bool) -> None:
        """Note that the backward of a micro-batch begins or has ended."""
        if over:
            self._over.add(micro)
        else:
            self._backwards.add(micro)
        self._backwards -= self._over

    def left(self) -> list[ForwardRequest]:
        """Return the requests that were not run."""
        return list(self._waiting.values())
