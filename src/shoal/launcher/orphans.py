"""Processes that ranks leave running in their own sessions, which no signal to a group reaches."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from shoal.util.clock import CLOCK

GRACE = 30.0
"""Seconds that they have to finish after a run that ended well, as an uploader may need."""

_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_PAUSE = 0.05


class Orphans:
    """Makes this process the parent of orphaned descendants, from `adopt` to `release`.

    Otherwise the kernel would make them children of init, and their origin would be unknown.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._groups: set[int] = set()
        self._former: Any = None

    def adopt(self) -> None:
        """Start; the current children of this process are not orphans. In the main thread."""
        self._known = {process.pid for process in psutil.Process().children()}
        _subreaper(True)
        # Those that end by themselves would stay zombies until the end of the run.
        self._former = signal.signal(signal.SIGCHLD, self._reap)

    def release(self) -> None:
        """Stop adopting orphans. A second call has no effect."""
        if self._former is not None:
            signal.signal(signal.SIGCHLD, self._former)
            _subreaper(False)
            self._former = None

    def expect(self, groups: Iterable[int]) -> None:
        """Register the process groups of ranks, whose members are killed with their rank."""
        self._groups.update(groups)

    def left(self) -> list[psutil.Process]:
        """Return those that are running."""
        if self._former is None:
            return []
        return [process for process in psutil.Process().children() if self._is_left(process)]

    def end(self, grace: float) -> list[str]:
        """Wait at most `grace` seconds until all have ended, and kill the others; return their names.

        An exception in the wait, such as a second Ctrl-C, ends it and still kills.
        """
        deadline = CLOCK.now() + grace
        killed: dict[int, str] = {}
        try:
            while self.left() and CLOCK.now() < deadline:
                CLOCK.sleep(_PAUSE)
        finally:
            while found := self.left():  # a killed one leaves its children
                for process in found:
                    killed.setdefault(process.pid, name(process))
                    with suppress(psutil.Error):
                        process.kill()
                CLOCK.sleep(_PAUSE)
        return list(killed.values())

    def _is_left(self, process: psutil.Process) -> bool:
        if process.pid in self._known:
            return False
        with suppress(psutil.Error, ProcessLookupError):
            ended = process.status() == psutil.STATUS_ZOMBIE
            return not ended and os.getpgid(process.pid) not in self._groups
        return False

    def _reap(self, _: int, __: FrameType | None) -> None:
        with suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid in self._known:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)


def name(process: psutil.Process) -> str:
    """Return the name of a process in messages: its id, its command, and the rank that it inherited."""
    command, rank = "?", ""
    with suppress(psutil.Error):
        command = shlex.join(process.cmdline())[:80]
        rank = process.environ().get("RANK", "")
    return f"process {process.pid} ({command})" + (f" of rank {rank}" if rank else "")


def _subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
