"""Signals to the launcher, turned into one exception at a place where it can be handled."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection

from shoal.util.signal_handler import handle_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a launcher."""

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce an end to ranks, which the launcher only forwards."""


def signal_when_broken(pipe: int, signum: int, *, to: int) -> None:
    """Send `signum` to `to` (a process, or minus a group) when all writers of `pipe` have ended.

    The pipe must carry no more data. The kernel itself sends the signal; a thread could be blocked by a
    call into C.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, to)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signum)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if connection.wait([pipe], 0):
        os.kill(to, signum)


class Interrupted(BaseException):
    """An exception for a signal that ends the launcher."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def passed_on(self) -> int:
        """The signal for the ranks: Ctrl-C unchanged, all others as the request to end that they
        expect.
        """
        return self.signum if self.signum == signal.SIGINT else signal.SIGTERM


class Interrupts:
    """Raises Interrupted in the main thread at the first signal and at a Ctrl-C that follows one.

    The first asks the ranks to end. Schedulers repeat signals while ranks save, so only Ctrl-C kills
    them then, and no signal may interrupt the killing. Signals in FORWARDED are forwarded, and raise
    only if there is no rank yet. Signals that were ignored (by `nohup`, or in the background) stay
    ignored.
    """

    def __init__(self) -> None:
        self._asked = False
        self._killed = False
        self._held: tuple[int, ...] = ()
        self._pending = 0

    @contextmanager
    def handled(self, forward: Callable[[int], bool]) -> Iterator[None]:
        """Handle signals inside this context, including those that were blocked before it.

        `forward` sends a signal to the ranks and returns whether there are any.
        """
        self._forward = forward
        ignored = (signal.SIG_IGN, None)
        mine = [n for n in (*SIGNALS, *FORWARDED) if signal.getsignal(n) not in ignored]
        with handle_signals(mine, self._handle):
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, mine)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @contextmanager
    def held(self, *signals: int) -> Iterator[None]:
        """Delay these signals, or all without arguments, until the end of this context."""
        self._held = signals or (*SIGNALS, *FORWARDED)
        try:
            yield
        finally:
            self._held = ()
        if self._pending:
            signum, self._pending = self._pending, 0
            self._act(signum)

    def _handle(self, signum: int, _: object) -> None:
        if signum in self._held:
            self._pending = signum
        else:
            self._act(signum)

    def _act(self, signum: int) -> None:
        if signum in FORWARDED and self._forward(signum):
            return
        if not self._asked:
            self._asked = True
            raise Interrupted(signum)
        if signum == signal.SIGINT and not self._killed:
            self._killed = True
            raise Interrupted(signum)
