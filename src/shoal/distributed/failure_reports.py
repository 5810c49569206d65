"""Reports of ranks of a batch job, which has no launcher of Shoal's to hear of their failures."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shoal.distributed.failure import from_exception, report

_ROOM = 17


def report_into(folder: Path, *, rank: int, size: int) -> None:
    """Let an exception that ends this process leave its report in a directory.

    Files sort by how much they tell: errors of a rank's own come before those that read as the death
    of a peer, and of these and those the earliest first.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A rank takes a while to end, and the others notice: its file has to be the first.
        with suppress(OSError):
            now = time.time()
            found = from_exception(error, rank=rank, host=socket.gethostname(), when=now)
            if not isinstance(error, KeyboardInterrupt):
                name = f"{int(found.by_peer)}-{now:0{_ROOM}.6f}-{rank}"
                (folder / name).write_text(report(found, size=size))
        before(kind, error, trace)

    sys.excepthook = hook
