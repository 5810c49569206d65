"""Distinction between the lines of user code in a stack and those of libraries."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

from shoal.util.errors import ShoalError


@functools.cache  # called for each frame of a stack, at each collective of the first steps
def is_library(filename: str) -> bool:
    """Return whether code of this file belongs to Python, an installed package or Shoal; `<string>`
    does too.
    """
    path = Path(filename)
    return (
        filename.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or path.is_relative_to(sysconfig.get_path("stdlib"))
        or path.is_relative_to(Path(__file__).parents[1])
    )


def own_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback with the frames of the user's own code only.

    In Python's development mode (`python -X dev`), return all frames.
    """
    if sys.flags.dev_mode:
        return trace
    frames = []
    while trace is not None:
        if not is_library(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    found = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def shorten_tracebacks() -> None:
    """Let an uncaught ShoalError show the frames of the user's own code only.

    The hook that was set before still prints the error, and all other errors as they are.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShoalError):
            trace = own_traceback(trace)
            error.__traceback__ = trace  # Python prints this one
        before(kind, error, trace)

    sys.excepthook = hook
