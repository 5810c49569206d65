"""The private names of CPython that the launcher uses, one function for each purpose.

They are from CPython 3.11. If a later version lacks one, the function does less, as its docstring says,
and `tests/launcher/test_cpython.py` fails with the name.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import suppress
from multiprocessing import forkserver


def join_threads() -> None:
    """Wait for the threads of this process, by `threading._shutdown`, as Python does when it exits.

    It also ends thread pools, which no public function does for all of them. Without it, processes of
    multiprocessing end their threads later, after the functions registered with atexit.
    """
    if shutdown := getattr(threading, "_shutdown", None):
        shutdown()


def run_exit_functions() -> None:
    """Call the functions registered with atexit, by `atexit._run_exitfuncs`.

    Processes of multiprocessing do not call them, and there is no public way to do it. Without this
    private name they are not called.
    """
    if run := getattr(atexit, "_run_exitfuncs", None):
        run()


def stop_fork_server() -> None:
    """Kill the fork server of multiprocessing and wait for its end.

    Only then does the processor time of the ranks count as used by the command, for `time` and others.
    Only `forkserver._forkserver._forkserver_pid` has the process id, and `_stop` waits for it. Without
    these names the server ends by itself, after this process.
    """
    server = getattr(forkserver, "_forkserver", None)
    process, stop = getattr(server, "_forkserver_pid", None), getattr(server, "_stop", None)
    if process is not None and stop is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # it has no work left
        with suppress(ChildProcessError):
            stop()
