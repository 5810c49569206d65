"""The end of all ranks after a hang: the report is shown once, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil

from shoal.distributed import env_vars
from shoal.distributed.cluster_env import LEFT, MAY_DIE
from shoal.distributed.failure import Failure, encode
from shoal.distributed.watchdog import stacks
from shoal.util.clock import CLOCK, run_within
from shoal.util.user_frames import is_library

EXIT_CODE = 124
"""Exit code of all ranks after a hang; timeout(1) has the same."""

_FLUSH_SECONDS = 0.5


def launched() -> bool:
    """Return whether a `shoal run` started this process; it shows the report and ends the rest."""
    return env_vars.reports() is not None


def tell_launcher(failure: Failure) -> bool:
    """Send the failure of a rank to the `shoal run` that started this process; False if none did."""
    return _tell(encode(failure))


def tell_left() -> None:
    """Notify the `shoal run` that started this process, if any, that it leaves its world.

    An error that makes it leave is reported as such instead.
    """
    error = sys.exception()
    if error is None:
        lines = stacks.stack(sys._getframe())
    elif isinstance(error, SystemExit) and not error.code:
        lines = stacks.traced(error)
    else:
        return
    own = stacks.own_line(lines)
    place = "" if is_library(own.file) else str(own)
    notice = {"place": place, "ended": False, "when": CLOCK.now()}
    _tell(LEFT + json.dumps(notice).encode())


def tell_joined() -> None:
    """Revoke `tell_left` for an earlier world of this process."""
    _tell(LEFT + json.dumps(None).encode())


def may_die_alone() -> None:
    """Make the `shoal run` that started this process, if any, keep the others if it is killed."""
    _tell(MAY_DIE)


def _tell(message: bytes) -> bool:
    """Send the launcher a message, if it still listens; return False if no `shoal run` started this
    process.
    """
    pipe = env_vars.reports()
    if pipe is None:
        return False
    with suppress(OSError), Connection(os.dup(pipe), readable=False) as launcher:
        launcher.send_bytes(message)
    return True


def tell_people(failure: Failure, size: int) -> None:
    """Write the failure of one of `size` ranks to stderr."""
    say(f"{failure.text}\nwhere: rank {failure.rank} of {size} on {failure.where}")


def say(text: str) -> None:
    """Write a text to stderr, followed by a new line unless it ends with one."""
    within(_FLUSH_SECONDS, lambda: _write(text))


def _write(text: str) -> None:
    sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
    sys.stderr.flush()


def exit_process(strangers: Iterable[tuple[int, float]], code: int = EXIT_CODE) -> NoReturn:
    """End this process, its children, and stopped processes, given by (id, time of birth)."""
    try:
        within(_FLUSH_SECONDS, lambda: sys.stdout and sys.stdout.flush())  # it may be None
        doomed = psutil.Process().children(recursive=True)
        for pid, born in strangers:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == born:
                    doomed.append(process)
        for process in doomed:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
    finally:
        os._exit(code)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Run an action for at most `seconds`: the disk or a lock of the main thread may block it."""
    with suppress(AttributeError, OSError, ValueError):  # stdout may be None or closed
        run_within(seconds, action)
