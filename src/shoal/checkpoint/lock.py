"""One live run per directory: two would remove what the other is writing."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from shoal.errors import CheckpointError

WAIT_SECONDS = 5.0
"""What a killed attempt may need to be gone."""


class Lock:
    """A POSIX record lock on a file: it ends with its process, however that ends, and forked workers
    don't hold it. Several runs of one process share it. File systems without locks go without.

    Raises CheckpointError, naming the other process, where another one holds it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        until = time.monotonic() + WAIT_SECONDS
        while not self._take():
            if time.monotonic() > until:
                holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
                self.release()
                raise CheckpointError(
                    given=f"a Run in {path.parent}",
                    found=f"another one that is alive there: {holder}",
                    fix="wait for it or end it, or choose another directory: shoal.Run('runs/b', …)",
                )
            time.sleep(0.05)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _take(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def release(self) -> None:
        """Let others in; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
