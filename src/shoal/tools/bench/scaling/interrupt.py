"""Ctrl-C that keeps the results so far: the first requests the end, a second has its usual effect."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class InterruptFlag:
    """A context in which the first SIGINT or SIGTERM sets `asked` and does nothing else.

    If `at_once` is set, it also raises KeyboardInterrupt. It works only in the main thread, like all of
    Python's signal handlers.
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
