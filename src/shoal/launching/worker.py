"""What runs in each process of a run: the user's script, as `python script.py` would run it."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import fcntl
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection

from ..cores import divide
from ..environ import SAFE_PATH, threads_variable, write_variables
from .failure import encode, exit_status, from_exception

SHIELDED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that the fork server blocks, and so a rank in its first moments."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A Python file and its arguments, as typed.

    `safe_path` is whether Python was told not to look for modules beside the file (`-P`).
    """

    path: str
    args: tuple[str, ...] = ()
    safe_path: bool = False


def main(script: Script, rank: int, variables: Mapping[str, str], reports: Connection) -> None:
    """Run `script` as rank `rank`; a failure goes to `reports` and is not printed here."""
    bind_to_launcher()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    _become_main()
    write_variables({**variables, SAFE_PATH: "1" if script.safe_path else None})
    _take_cores(int(variables["LOCAL_RANK"]), int(variables["LOCAL_WORLD_SIZE"]))
    try:
        run_script(script)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = exit_status(error)[0] if isinstance(error, SystemExit) else 1
        if code:
            when = time.monotonic()
            failure = from_exception(error, rank=rank, host=socket.gethostname(), when=when)
            _flush()
            reports.send_bytes(encode(failure))
    else:
        code = 0
    # As Python does at its end; multiprocessing leaves out the functions registered with atexit.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.exit(code)


def bind_to_launcher() -> None:
    """Put this process and its children in a process group that dies with the launcher.

    The group also keeps the terminal's Ctrl-C from reaching ranks: the launcher passes it on, once.
    The parent is a fork server that outlives the launcher as long as ranks do, so the parent's
    death would say nothing; the pipe that the launcher holds open does. The kernel itself sends the
    signal when that pipe breaks: no thread, which a call into C might keep from running.
    """
    os.setpgid(0, 0)
    launcher = multiprocessing.parent_process()
    if launcher is None:
        raise RuntimeError("a worker is started by multiprocessing, not called")
    pipe = launcher.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not launcher.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def _take_cores(local_rank: int, local_size: int) -> None:
    """Run on this process's share of the machine, so that no two ranks get in each other's way.

    Not where the user has asked for more threads than fit there.
    """
    mine = divide(os.sched_getaffinity(0), local_size)[local_rank]
    wanted = threads_variable()
    if not wanted.isdecimal() or int(wanted) <= len(mine):
        os.sched_setaffinity(0, mine)


def _become_main() -> None:
    """Look to the script like a process that nobody forked."""
    multiprocessing.current_process().name = "MainProcess"
    # Otherwise data loaders would start their workers as this process was started.
    multiprocessing.set_start_method(None, force=True)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def run_script(script: Script) -> None:
    """Execute a file as the module `__main__`.

    The module is a real one with a `__file__`, so that processes which the script starts by spawn
    or forkserver can import it again, and `inspect` and TorchScript find its source.
    """
    path = os.path.abspath(script.path)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [script.path, *script.args]
    if not script.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with io.open_code(path) as file:
        # Not inheriting this file's own `from __future__` lines.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
