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

from shoal.distributed.env_vars import placement
from shoal.distributed.failure import Failure, decode, reason
from shoal.launcher.signals import SIGNALS
from shoal.util import pickling
from shoal.util.errors import LaunchError

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

# Neither the folder of a script nor the current one is searched before the caller's path is known.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from shoal.launcher.function_process import main; main()"
)
# Only processes that have left the run by themselves can hold the pipes open longer.
_LAST_WORDS = 2.0
_PIECE = 1 << 16


def launch(
    function: Callable[[*_Args], _T], *args: *_Args, processes: int, restarts: int = 0
) -> list[_T]:
    """Run a function in several processes on this machine and return its results.

    It works in notebooks, and in scripts without an `if __name__ == "__main__"` guard. The function
    may be defined there. It calls `shoal.init()` as a script under `shoal run` does, and its output
    appears in the caller's. The processes are new: they have the caller's environment variables,
    `sys.path`, `sys.argv` and current directory, but not its open files, its GPU memory or settings
    such as torch's default dtype. The function, its arguments and its results are pickled, in memory
    only. Ctrl-C is forwarded to the ranks; a second Ctrl-C kills them.

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
        "cells": _cells(),
    }
    call = pickling.pickle_call(function, args, given=given)
    kind, values = _ask([json.dumps(order).encode(), call], processes)
    if kind == pickling.RETURNED:
        return [cast(_T, _unpickled(value, rank, given)) for rank, value in enumerate(values)]
    if kind == pickling.FAILED:
        raise _failed(decode(values[0]), given)
    if kind == pickling.REFUSED:
        given, found, fix = json.loads(values[0])
        raise LaunchError(given=given, found=found, fix=fix)
    raise LaunchError(
        given=given,
        found=f"the process that starts the ranks ended early, {kind.decode()}",
        fix="see what is printed above, if anything; `shoal run -n 1 script.py` may say more",
    )


def _name(function: object) -> str:
    # Not its repr: that of a partial shows all arguments.
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _unpickled(value: bytes, rank: int, given: str) -> object:
    """What a rank returned; None where it left without returning."""
    try:
        return pickling.unpickle(value) if value else None
    except Exception as error:
        raise LaunchError(
            given=given,
            found=f"what rank {rank} returned can't be unpickled here: {type(error).__name__}: {error}",
            fix="return numbers, arrays, tensors, a state_dict or other plain values",
        ) from error


def _check(function: object, processes: object, restarts: object, given: str) -> None:
    if not callable(function):
        raise LaunchError(
            given=given,
            found=f"{function!r} can't be called",
            fix="give the function and its arguments apart: shoal.launch(train, 0.1, processes=2)",
        )
    for name, value, least in (("processes", processes, 1), ("restarts", restarts, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise LaunchError(
                given=f"launch({_name(function)}, {name}={value!r})",
                found=f"{name} is a whole number, {least} or more",
                fix=f"shoal.launch({_name(function)}, …, processes=2)",
            )
    here = placement()
    if here.size > 1:
        raise LaunchError(
            given=given,
            found=f"this process is rank {here.rank} of {here.size} already, by {here.launcher}",
            fix=f"call {_name(function)}(…) itself, on each rank, and let the launcher start them",
        )


def _cells() -> dict[str, str]:
    """The text of code that is in no file, such as a notebook's, for the tracebacks of ranks."""
    entries = list(linecache.cache.items())
    return {name: "".join(entry[2]) for name, entry in entries if len(entry) == 4 and entry[1] is None}


def _failed(failure: Failure, given: str) -> LaunchError:
    return LaunchError(
        given=given,
        found=f"rank {failure.rank}: {reason(failure)} ({failure.where})",
        fix="see the report above, which is that rank's; processes=1 runs the function alone",
    )


def _ask(order: Sequence[bytes], processes: int) -> tuple[bytes, list[bytes]]:
    """Have a new launcher do it; the kind of its answer and what follows, or how it ended."""
    ours, low = os.pipe()
    # Not in the place of a stdout that is closed, where ranks would print into it.
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
    """The launcher's process and its stdin; it ends with the block, and what it started with it.

    It has a session of its own, so that the terminal's Ctrl-C does not reach it.
    """
    # Python itself passes over anything else in its path.
    path = json.dumps([folder for folder in sys.path if isinstance(folder, str)])
    command = [sys.executable, "-P", "-c", _PROGRAM, path, str(answer)]
    shown = [(sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)]
    out, err = (_where(now, first) for now, first in shown)
    for now, _ in shown:
        if not _gone(now):
            # A caller whose reader is gone meets that at its own next word.
            with suppress(OSError):
                now.flush()
    # The launcher receives signals when it is ready for them, and this thread when it can pass
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
    """Where the launcher and the ranks write for subprocess: where this process began to, through
    a pipe to what has taken its place since, or nowhere."""
    if _gone(now):
        return subprocess.DEVNULL
    return None if now is first else subprocess.PIPE


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher that has not ended; its ranks end with it."""
    if launcher.poll() is None:
        launcher.kill()
    launcher.wait()
    # What it did not read is of no interest.
    with suppress(BrokenPipeError):
        cast(IO[bytes], launcher.stdin).close()


@contextmanager
def _interruptible(launcher: subprocess.Popen[bytes], answer: IO[bytes]) -> Iterator[None]:
    """Pass Ctrl-C on and wait for the end of all; the launcher kills at the second."""
    try:
        yield
    except KeyboardInterrupt:
        # It may be about to write more than fits into the pipe.
        answer.close()
        while launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            with suppress(KeyboardInterrupt):
                launcher.wait()
        raise


def _relay(pipe: IO[bytes], stream: TextIO) -> None:
    """Copy what comes through a pipe of the launcher's to sys.stdout or sys.stderr."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    data = b"more"
    with pipe:
        while data:
            data = os.read(pipe.fileno(), _PIECE)
            # Into a stream that is closed nothing goes, but ranks must not wait for a reader.
            with suppress(ValueError, OSError):
                stream.write(decoder.decode(data, final=not data))
                stream.flush()
