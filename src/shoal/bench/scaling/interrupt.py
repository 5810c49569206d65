"""Ctrl-C that keeps what was measured: the first one asks for an end, a second one is as always."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class InterruptFlag:
    """Inside of this context the first SIGINT or SIGTERM sets `asked`, and nothing else happens.

    Where `at_once` is set, it raises KeyboardInterrupt too. In the main thread only, as Python has it
    for handlers.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.at_once = False

    def __enter__(self) -> InterruptFlag:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number, before in self._before.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.asked = bool(self.asked), number
        if again or self.at_once:
            raise KeyboardInterrupt
