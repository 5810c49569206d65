"""Reports of failed ranks of a batch job, which has no launcher of Shoal to receive them."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shoal.distributed.failure import from_exception, report
from shoal.util.clock import CLOCK

_ROOM = 17


def report_into(folder: Path, *, rank: int, size: int) -> None:
    """Write a report into a directory if an exception ends this process.

    Files sort by relevance: a rank's own errors come before those that look like the death of a peer,
    and the earliest come first.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A rank takes a while to exit, and the others notice its end: its file must sort first.
        with suppress(OSError):
            now = CLOCK.wall()
            found = from_exception(error, rank=rank, host=socket.gethostname(), when=now)
            if not isinstance(error, KeyboardInterrupt):
                name = f"{int(found.by_peer)}-{now:0{_ROOM}.6f}-{rank}"
                (folder / name).write_text(report(found, size=size))
        before(kind, error, trace)

    sys.excepthook = hook
