"""The launcher process of `shoal.launch`: does for a call what `shoal run` does for a script.

It is a separate process, so that the open files, imports and threads of the caller do not matter, and
so that a notebook can launch any number of times. Its stdin has the call, and breaks when the caller
dies; another pipe returns the results of the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from typing import IO

from shoal.distributed.failure import encode
from shoal.launcher.entry_point import FunctionCall
from shoal.launcher.local import run_job
from shoal.launcher.signals import signal_when_broken
from shoal.util import pickling
from shoal.util.errors import LaunchError


def main() -> None:
    """Run the launcher; `sys.argv[1]` is the file descriptor for the answer."""
    # Ranks and the fork server must not hold the caller's pipe.
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # A caller that has ended, or does not listen after Ctrl-C, needs no answer.
    gone = suppress(EOFError, BrokenPipeError)
    with gone, open(pipe, "rb") as caller, open(int(sys.argv[1]), "wb") as answer:
        order = json.loads(pickling.read_framed(caller))
        pickled = pickling.read_framed(caller)
        signal_when_broken(pipe, signal.SIGTERM, to=os.getpid())
        sys.argv = order["argv"]
        call = FunctionCall(
            name=order["name"],
            pickled=pickled,
            cells=order["cells"],
            path=tuple(order["path"]),
            safe_path=order["safe_path"],
        )
        sys.exit(_answer(answer, call, order["processes"], order["restarts"]))


def _answer(answer: IO[bytes], call: FunctionCall, processes: int, restarts: int) -> int:
    try:
        end = run_job(call, processes=processes, restarts=restarts)
    except LaunchError as error:
        pickling.write_framed(answer, pickling.REFUSED)
        pickling.write_framed(answer, json.dumps(error.texts).encode())
        return 2
    if end.failure is not None:
        pickling.write_framed(answer, pickling.FAILED)
        pickling.write_framed(answer, encode(end.failure))
    elif end.code == 0:
        pickling.write_framed(answer, pickling.RETURNED)
        for value in end.values:
            pickling.write_framed(answer, value)
    return end.code
