"""What runs in each process of a run, around the job that it was started for."""

from __future__ import annotations

import faulthandler
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.distributed.cluster_env import LEFT
from shoal.distributed.cpu_affinity import divide
from shoal.distributed.env_vars import REPORTS, SAFE_PATH, threads_variable, write_variables
from shoal.distributed.failure import encode, exit_status, from_exception, locate
from shoal.launcher._cpython import join_threads, run_exit_functions
from shoal.launcher.entry_point import EntryPoint
from shoal.launcher.signals import FORWARDED, signal_when_broken

SHIELDED = (signal.SIGTERM, signal.SIGHUP, *FORWARDED)
"""Signals that the fork server blocks, and so a rank in its first moments."""

RETURNED = b"returned"
"""What a rank sends before the value of its job; all else is a failure."""


def main(
    job: EntryPoint, rank: int, variables: Mapping[str, str], reports: Connection, log: str | None
) -> None:
    """Run `job` as rank `rank`; what it returns goes to `reports`.

    So does a failure, which is not printed here. All that is written to stdout and stderr is
    appended to the file `log`, if there is one.
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
    _take_cores(int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"]))
    try:
        value = job.run()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = exit_status(error)[0] if isinstance(error, SystemExit) else 1
        if not code:
            # A handler of the script's own may have raised it before all was done.
            finished = not callable(signal.getsignal(signal.SIGTERM))
            _tell_end(reports, locate(error) or "", finished=finished)
        else:
            when = time.monotonic()
            failure = from_exception(error, rank=rank, host=socket.gethostname(), when=when)
            _flush()
            reports.send_bytes(encode(failure))
    else:
        code = 0
        _tell_end(reports, "", finished=True)
        if value is not None:
            reports.send_bytes(RETURNED)
            reports.send_bytes(value)
    if not code and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # All is done: the end of the script is no longer cut short, and keeps its exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # As Python does at its end; multiprocessing leaves out the functions registered with atexit.
    join_threads()
    run_exit_functions()
    sys.exit(code)


def _tell_end(reports: Connection, place: str, *, finished: bool) -> None:
    """Tell the launcher that the script has ended without an error, in case others still need it."""
    notice = {"place": place, "ended": True, "finished": finished, "when": time.monotonic()}
    reports.send_bytes(LEFT + json.dumps(notice).encode())


def bind_to_launcher() -> None:
    """Put this process and its children in a process group that dies with the launcher.

    The group also keeps the terminal's Ctrl-C from reaching ranks: the launcher passes it on, once.
    The parent is a fork server that outlives the launcher as long as ranks do, so the parent's
    death would say nothing; the pipe that the launcher holds open does.
    """
    os.setpgid(0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is None:
        raise RuntimeError("a worker is started by multiprocessing, not called")
    signal_when_broken(launcher.sentinel, signal.SIGKILL, to=-os.getpgrp())


def _write_to(log: str) -> None:
    """Turn the file descriptors of stdout and stderr, which children inherit, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _take_cores(local_rank: int, local_size: int) -> None:
    """Run on this process's share of the machine, so that no two ranks get in each other's way.

    Not where the user has asked for more threads than fit there.
    """
    mine = divide(os.sched_getaffinity(0), local_size)[local_rank]
    wanted = threads_variable()
    if not wanted.isdecimal() or int(wanted) <= len(mine):
        os.sched_setaffinity(0, mine)


def _be_called(name: str) -> None:
    """Let ps, top and pgrep show what this process runs, and its rank; Linux keeps 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _become_main() -> None:
    """Look to the script like a process that nobody forked."""
    multiprocessing.current_process().name = "MainProcess"
    # Otherwise data loaders would start their workers as this process was started.
    multiprocessing.set_start_method(None, force=True)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines also under PYTHONUNBUFFERED, or those of several ranks come in pieces.
            stream.reconfigure(line_buffering=True, write_through=False)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed by the script, or on a disk that is full: a failure is told all the same.
        with suppress(OSError, ValueError):
            stream.flush()
