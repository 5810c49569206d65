"""A handler of signals for the time of a `with` block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Call `handler` for these signals. Like all handlers, it works only in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
