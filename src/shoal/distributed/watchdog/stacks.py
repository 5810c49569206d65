"""The places at which the threads of this process are.

No source file is read, since the file system may cause the hang.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from shoal.util.user_frames import is_library

_COMPILERS = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
"""On the stack only while torch compiles, and not while what it compiled runs."""
_IMPORT = "<frozen importlib"
_DEBUGGERS = ("/bdb.py", "/pydevd.py", "/pydevd_bundle/")
_COMMUNICATION = "torch/distributed/"
_STORAGE = "torch/distributed/checkpoint/"
_INBOX = "shoal/strategies/rpc_pipeline/messages.py"
"""Where the main thread waits for what comes by RPC, which other threads receive."""


@dataclass(frozen=True, kw_only=True)
class StackLine:
    """A line of code and the function that it is in."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def thread_stack(thread: threading.Thread) -> list[StackLine]:
    """Return the stack of a thread, innermost last."""
    return stack(sys._current_frames().get(thread.ident or 0))


def stack(frame: FrameType | None) -> list[StackLine]:
    """Return the calls that led to a frame, innermost last."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(
            StackLine(file=code.co_filename, number=frame.f_lineno or 0, function=code.co_name)
        )
        frame = frame.f_back
    return lines[::-1]


def traced(error: BaseException) -> list[StackLine]:
    """Return the calls between the place where an error was raised and its handler, innermost last."""
    calls = traceback.walk_tb(error.__traceback__)
    return [
        StackLine(file=frame.f_code.co_filename, number=number or 0, function=frame.f_code.co_name)
        for frame, number in calls
    ]


def own_line(lines: Sequence[StackLine]) -> StackLine:
    """Return the innermost line of user code; of any code if there is none."""
    own = [line for line in lines if not is_library(line.file)]
    return (own or list(lines) or [StackLine(file="?", number=0, function="?")])[-1]


def busy(lines: Sequence[StackLine]) -> str:
    """Return an activity of a thread that may take long: "compiles", "is in a debugger", "imports
    modules".

    Empty for any other. While a user's module is imported, its lines are user code, which may be the
    cause of a hang.
    """
    files = [line.file for line in lines]
    if any(file.endswith(_COMPILERS) for file in files):
        return "compiles"
    if any(part in file for file in files for part in _DEBUGGERS):
        return "is in a debugger"
    own = max((index for index, file in enumerate(files) if not is_library(file)), default=-1)
    if any(file.startswith(_IMPORT) for file in files[own + 1 :]):
        return "imports modules"
    return ""


def communication(lines: Sequence[StackLine]) -> str:
    """Return the function of torch.distributed from which a thread has called C code; empty if none.

    Such a call sends, receives or waits, except in files of checkpoints. The waits for messages in
    Shoal's own strategies count too.
    """
    last = lines[-1] if lines else None
    if last is None:
        return ""
    torchs = _COMMUNICATION in last.file and _STORAGE not in last.file
    return last.function if torchs or last.file.endswith(_INBOX) else ""


def background_threads(main: threading.Thread) -> set[str]:
    """Return the ids of the threads that Python has started, except `main`.

    Autograd's threads for GPUs, which begin the collectives of a backward pass, are none of them.
    Python learns of such a thread when it calls `threading.current_thread`, and names it "Dummy-1".
    """
    others = [thread for thread in threading.enumerate() if thread is not main]
    return {str(thread.ident) for thread in others if not thread.name.startswith("Dummy-")}


def all_stacks(main: threading.Thread) -> str:
    """Return the stacks of all threads as text, that of `main` first, innermost lines last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main.ident, ident)):
        parts.append(f"  thread {names.get(ident, ident)}\n")
        parts += [f"    {line} in {line.function}\n" for line in stack(frames[ident])]
    return "".join(parts)
