"""The code that runs in each process of a run, around its job."""

from __future__ import annotations

import faulthandler
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.distributed.cluster_env import LEFT
from shoal.distributed.cpu_affinity import divide
from shoal.distributed.env_vars import REPORTS, SAFE_PATH, THREADS, variable, write_variables
from shoal.distributed.failure import encode, exit_status, from_exception, locate
from shoal.launcher._cpython import join_threads, run_exit_functions
from shoal.launcher.entry_point import EntryPoint
from shoal.launcher.signals import FORWARDED, signal_when_broken
from shoal.util.clock import CLOCK

SHIELDED = (signal.SIGTERM, signal.SIGHUP, *FORWARDED)
"""Signals that the fork server blocks, and so a rank during its start."""

RETURNED = b"returned"
"""The bytes that a rank sends before the result of its job; all else is a failure."""


def main(
    job: EntryPoint, rank: int, variables: Mapping[str, str], reports: Connection, log: str | None
) -> None:
    """Run `job` as rank `rank` and send its result to `reports`.

    A failure is sent too, and not printed here. All output on stdout and stderr is appended to the file
    `log`, if there is one.
    """
    bind_to_launcher()
    if log is not None:
        _write_to(log)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    _become_main()
    command = job.name.removeprefix("-m ").split()[0]
    _be_called(f"{os.path.basename(command)[:11]} {rank}")
    write_variables({**variables, SAFE_PATH: "1" if job.safe_path else None})
    write_variables({REPORTS: f"{os.getpid()}:{reports.fileno()}"})
    from shoal._torch.c10d import host_stores_except  # the launcher imports this file without torch

    host_stores_except(int(variables["MASTER_PORT"]))
    _take_cores(int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"]))
    try:
        value = job.run()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = exit_status(error)[0] if isinstance(error, SystemExit) else 1
        if not code:
            # A signal handler of the script may have raised it before the end of the block.
            finished = not callable(signal.getsignal(signal.SIGTERM))
            _tell_end(reports, locate(error) or "", finished=finished)
        else:
            when = CLOCK.now()
            failure = from_exception(error, rank=rank, host=socket.gethostname(), when=when)
            sys.last_value = error  # for exit functions, as Python sets it
            _flush()
            _report(reports, encode(failure))
    else:
        code = 0
        _tell_end(reports, "", finished=True)
        if value is not None:
            _report(reports, RETURNED)
            _report(reports, value)
    if not code and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # All is done: signals no longer interrupt the end of the script, which keeps its exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # As Python does when it exits; multiprocessing does not call the functions registered with atexit.
    join_threads()
    run_exit_functions()
    sys.exit(code)


def _report(reports: Connection, content: bytes) -> None:
    """Send to the launcher, unless it reads no more, as once the ranks are to be stopped."""
    with suppress(BrokenPipeError):
        reports.send_bytes(content)


def _tell_end(reports: Connection, place: str, *, finished: bool) -> None:
    """Report to the launcher that the script has ended without an error; others may still need it."""
    notice = {"place": place, "ended": True, "finished": finished, "when": CLOCK.now()}
    _report(reports, LEFT + json.dumps(notice).encode())


def bind_to_launcher() -> None:
    """Put this process and its children in a process group that dies with the launcher.

    The group also keeps the terminal's Ctrl-C from reaching ranks: the launcher forwards it, once. The
    parent is a fork server that lives as long as ranks do, even without the launcher, so its death is
    no signal. The pipe that the launcher holds open is.
    """
    os.setpgid(0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is None:
        raise RuntimeError("a worker is started by multiprocessing, not called")
    signal_when_broken(launcher.sentinel, signal.SIGKILL, to=-os.getpgrp())


def _write_to(log: str) -> None:
    """Redirect the file descriptors of stdout and stderr, which children inherit, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _take_cores(local_rank: int, local_size: int) -> None:
    """Restrict this process to its own cores of the machine, so that ranks do not compete for cores.

    It does nothing if the user has set more threads than these cores.
    """
    mine = divide(os.sched_getaffinity(0), local_size)[local_rank]
    wanted = variable(THREADS)
    if not wanted.isdecimal() or int(wanted) <= len(mine):
        os.sched_setaffinity(0, mine)


def _be_called(name: str) -> None:
    """Make ps, top and pgrep show the script and the rank of this process; Linux keeps 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _become_main() -> None:
    """Make this process look to the script as if it had not been forked."""
    multiprocessing.current_process().name = "MainProcess"
    # Otherwise data loaders would start their workers as this process was started.
    multiprocessing.set_start_method(None, force=True)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Complete lines even under PYTHONUNBUFFERED, or the output of several ranks is interleaved.
            stream.reconfigure(line_buffering=True, write_through=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed by the script, or on a full disk: a failure must be reported anyway.
        with suppress(OSError, ValueError):
            stream.flush()
