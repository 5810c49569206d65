"""`shoal.launch`: run a function in N processes on this machine, from a script or a notebook."""

from __future__ import annotations

import codecs
import fcntl
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TextIO, TypeVar, TypeVarTuple, cast

from shoal.distributed.env_vars import placement, warn_alone
from shoal.distributed.failure import Failure, decode, reason
from shoal.launcher.signals import SIGNALS
from shoal.util import pickling
from shoal.util.arguments import check_integer
from shoal.util.errors import LaunchError
from shoal.util.python import code_command

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

# Files in the caller's directories hide no module from the launcher; only ranks get the caller's path.
_PROGRAM = (
    "import json, sys; sys.path += json.loads(sys.argv.pop(1)); "
    "from shoal.launcher.function_process import main; main()"
)
# Only processes that have detached themselves from the run can hold the pipes open longer.
_LAST_WORDS = 2.0
_PIECE = 1 << 16


def launch(
    function: Callable[[*_Args], _T], *args: *_Args, processes: int, restarts: int = 0
) -> list[_T]:
    """Run a function in several processes on this machine and return its results.

    It works in notebooks, and in scripts without an `if __name__ == "__main__"` guard. The function may
    be defined in the notebook or the script. It calls `shoal.init()` as a script under `shoal run`
    does, and its output appears in the output of the caller. The processes are new: they have the
    caller's environment variables, `sys.path`, `sys.argv` and current directory, but not its open
    files, its GPU memory or settings such as torch's default dtype. The function, its arguments and its
    results are pickled, in memory only. Ctrl-C is forwarded to the ranks; a second Ctrl-C kills them.

    Args:
        function: Function to run on each rank: picklable, or defined in a script or notebook.
        args: Positional arguments of the function, the same on each rank.
        processes: Number of ranks, at least 1.
        restarts: Number of times that Shoal restarts all ranks after one of them fails. Default: 0.

    Returns:
        The results of the function, in rank order; None for a rank that calls `sys.exit(0)`.

    Raises:
        LaunchError: If a rank fails, after its report. Also before any process starts, if an argument
            is invalid, the call can't be pickled, or this process is itself one of several ranks.

    Examples:
        >>> shoal.launch(pow, 2, 10, processes=2)
        [1024, 1024]
    """
    given = f"launch({_name(function)}, processes={processes!r})"
    _check(function, processes, restarts, given)
    order = {
        "name": _name(function),
        "processes": processes,
        "restarts": restarts,
        "argv": [str(each) for each in sys.argv],
        "safe_path": sys.flags.safe_path,
        "path": _path(),
        "cells": _cells(),
    }
    call = pickling.pickle_call(function, args, given=given)
    kind, values = _ask([json.dumps(order).encode(), call], processes)
    if kind == pickling.RETURNED:
        return [cast(_T, _unpickled(value, rank, given)) for rank, value in enumerate(values)]
    if kind == pickling.FAILED:
        raise _failed(decode(values[0]), given)
    if kind == pickling.REFUSED:
        raise LaunchError(**json.loads(values[0]))
    raise LaunchError(
        given=given,
        found=f"the process that starts the ranks ended early {kind.decode()}",
        fix="see the output above, if any; `shoal run -n 1 script.py` may print more",
    )


def _name(function: object) -> str:
    # Not its repr, since the repr of a partial shows all arguments.
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _unpickled(value: bytes, rank: int, given: str) -> object:
    """Return the result of a rank; None if it left without one."""
    try:
        return pickling.unpickle(value) if value else None
    except Exception as error:
        raise LaunchError(
            given=given,
            found=f"the result of rank {rank} can't be unpickled: {type(error).__name__}: {error}",
            fix="return numbers, arrays, tensors, a state_dict or other plain values",
        ) from error


def _check(function: object, processes: object, restarts: object, given: str) -> None:
    if not callable(function):
        raise LaunchError(
            given=given,
            found=f"{function!r} is not callable",
            fix="pass the function and its arguments separately: shoal.launch(train, 0.1, processes=2)",
        )
    for name, value, least in (("processes", processes, 1), ("restarts", restarts, 0)):
        check_integer(
            LaunchError,
            "shoal.launch",
            name,
            value,
            least,
            fix=f"shoal.launch({_name(function)}, …, processes=2)",
        )
    here = placement()
    if here.size > 1:
        raise LaunchError(
            given=given,
            found=f"this process is already rank {here.rank} of {here.size} of {here.launcher}",
            fix=f"call {_name(function)}(…) directly on each rank, since the launcher has started them",
        )
    if here.launcher == "none":
        warn_alone()  # raises on one of several hosts, where each would train alone


def _path() -> list[str]:
    return [folder for folder in sys.path if isinstance(folder, str)]  # Python ignores all else


def _cells() -> dict[str, str]:
    """Return the source of code without a file, such as a notebook's, for the tracebacks of ranks."""
    entries = list(linecache.cache.items())
    return {name: "".join(entry[2]) for name, entry in entries if len(entry) == 4 and entry[1] is None}


def _failed(failure: Failure, given: str) -> LaunchError:
    return LaunchError(
        given=given,
        found=f"rank {failure.rank}: {reason(failure)} ({failure.where})",
        fix="see that rank's report above; to run the function in one process, use processes=1",
    )


def _ask(order: Sequence[bytes], processes: int) -> tuple[bytes, list[bytes]]:
    """Start a launcher for the call; return the kind of its answer and the data, or how it ended."""
    ours, low = os.pipe()
    # Not the number of a closed stdout, since ranks would print into it.
    theirs = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(low)
    with open(ours, "rb") as answer, _started(theirs) as (launcher, orders):
        try:
            for part in order:
                pickling.write_framed(orders, part)
            with _interruptible(launcher, answer):
                kind = pickling.read_framed(answer)
                count = processes if kind == pickling.RETURNED else 1
                values = [pickling.read_framed(answer) for _ in range(count)]
                launcher.wait()
        except (BrokenPipeError, EOFError):
            return f"with exit code {launcher.wait()}".encode(), []
        return kind, values


@contextmanager
def _started(answer: int) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start the launcher's process, yield it with its stdin, and end it and its processes after the
    block.

    It is in a new session, so that the terminal's Ctrl-C does not reach it.
    """
    command = code_command(_PROGRAM, json.dumps(_path()), str(answer))
    shown = [(sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)]
    out, err = (_where(now, first) for now, first in shown)
    for now, _ in shown:
        if not _gone(now):
            # A caller whose reader has ended gets this error at its own next output.
            with suppress(OSError):
                now.flush()
    # The launcher receives signals when it is ready for them, and this thread when it can forward
    # them on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        try:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                pass_fds=[answer],
                start_new_session=True,
            )
        finally:
            os.close(answer)
        relays = [
            threading.Thread(target=_relay, args=(pipe, now), daemon=True)
            for pipe, (now, _) in zip((launcher.stdout, launcher.stderr), shown, strict=True)
            if pipe is not None
        ]
        try:
            for relay in relays:
                relay.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield launcher, cast(IO[bytes], launcher.stdin)
        finally:
            _end(launcher)
            for relay in relays:
                relay.join(_LAST_WORDS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _gone(stream: TextIO | None) -> bool:
    return stream is None or bool(getattr(stream, "closed", False))


def _where(now: TextIO | None, first: TextIO | None) -> int | None:
    """Return the stdout or stderr of the launcher and its ranks, for subprocess: the caller's original
    one, a pipe to its replacement, or /dev/null.
    """
    if _gone(now):
        return subprocess.DEVNULL
    return None if now is first else subprocess.PIPE


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher that has not ended; its ranks end with it."""
    if launcher.poll() is None:
        launcher.kill()
    launcher.wait()
    # Input that it did not read does not matter.
    with suppress(BrokenPipeError):
        cast(IO[bytes], launcher.stdin).close()


@contextmanager
def _interruptible(launcher: subprocess.Popen[bytes], answer: IO[bytes]) -> Iterator[None]:
    """Forward Ctrl-C and wait for the end of all; the launcher kills the ranks at the second."""
    try:
        yield
    except KeyboardInterrupt:
        # The launcher may be about to write more than fits into the pipe.
        answer.close()
        while launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            with suppress(KeyboardInterrupt):
                launcher.wait()
        raise


def _relay(pipe: IO[bytes], stream: TextIO) -> None:
    """Copy the output in a pipe of the launcher to sys.stdout or sys.stderr."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    data = b"more"
    with pipe:
        while data:
            data = os.read(pipe.fileno(), _PIECE)
            # A closed stream takes no output, but ranks must not wait for a reader.
            with suppress(ValueError, OSError):
                stream.write(decoder.decode(data, final=not data))
                stream.flush()
