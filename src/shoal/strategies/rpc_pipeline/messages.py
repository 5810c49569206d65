"""Messages of other ranks to the main thread of a rank during a turn, and the order of its passes."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from shoal.util.errors import ShoalError

LOOK_SECONDS = 1.0
"""Interval after which a rank without messages checks whether the others are alive."""


class StagePass(NamedTuple):
    """Message: run a forward pass, "F", or a backward pass, "B", of a micro-batch through the stage."""

    kind: str
    micro: int
    values: Any
    """The outputs of the stage before, or the gradients of this stage's outputs."""


class TurnDone(NamedTuple):
    """Message: a rank has run all its passes of the turn, or has failed."""

    rank: int
    error: ShoalError | None


Message: TypeAlias = StagePass | TurnDone


class Inbox:
    """Messages by the number of their turn, which this rank may not have begun.

    `look` is called if no message arrives for a while.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._turn = 0
        self._look = look
        self._over = 0
        self._lock = threading.Lock()
        self._queues: defaultdict[int, SimpleQueue[Message]] = defaultdict(SimpleQueue)

    def begin(self) -> int:
        """Begin the next turn, and return its number."""
        self._turn += 1
        return self._turn

    def end(self) -> None:
        """End the turn, and drop its messages."""
        with self._lock:
            self._over = self._turn
            self._queues.pop(self._turn, None)

    def post(self, turn: int, message: Message) -> None:
        """Send a message, unless that turn is over. From any thread."""
        with self._lock:
            if turn > self._over:
                self._queues[turn].put(message)

    def receive(self, *, wait: bool = True) -> Message | None:
        """Return the next message of this turn; without `wait`, None if there is none yet."""
        with self._lock:
            queue = self._queues[self._turn]
        while True:
            try:
                return queue.get(block=wait, timeout=LOOK_SECONDS)
            except Empty:
                if not wait:
                    return None
                self._look()


class PassQueue:
    """The passes of a stage: backward before forward, each in the order of the micro-batches.

    At most `ahead` micro-batches are between their two passes (as in the schedule 1F1B of Narayanan et
    al. 2019). Without `backward`, there are forward passes only.
    """

    def __init__(self, micros: range, *, ahead: int, backward: bool) -> None:
        self._order = {"B": deque(micros if backward else ()), "F": deque(micros)}
        self._ahead = ahead
        self._arrived: dict[tuple[str, int], StagePass] = {}

    @property
    def over(self) -> bool:
        """Whether all passes have been taken."""
        return not any(self._order.values())

    @property
    def ready(self) -> bool:
        """Whether a pass can run now."""
        return self._next() is not None

    def add(self, message: StagePass) -> None:
        """Add a pass whose values have arrived."""
        self._arrived[message.kind, message.micro] = message

    def take(self) -> StagePass | None:
        """Remove and return the pass that can run now, if there is one."""
        kind = self._next()
        return None if kind is None else self._arrived.pop((kind, self._order[kind].popleft()))

    def _next(self) -> str | None:
        full = len(self._order["B"]) - len(self._order["F"]) >= self._ahead
        for kind, order in self._order.items():
            if order and (kind, order[0]) in self._arrived and not (kind == "F" and full):
                return kind
        return None
