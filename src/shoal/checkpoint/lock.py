"""A lock for one running run per directory: two would remove each other's files."""

from __future__ import annotations

import fcntl
import math
import os
import re
import shlex
import socket
from pathlib import Path

from shoal.util.clock import CLOCK
from shoal.util.errors import CheckpointError
from shoal.util.regular_file import open_lock

WAIT_SECONDS = 5.0
"""The seconds that a killed attempt may need to end."""

TAKE_OVER_SECONDS = 1.0
"""The same if the next attempt of the same launcher need not wait for it."""


class Lock:
    """A POSIX record lock on a file, which ends with its process; forked workers don't hold it.

    Several runs of one process share it. On file systems without locks it has no effect.

    An attempt starts without the lock if an earlier attempt of the same `job` still holds it, whose
    machine was cut off or stopped: the launcher knows that that attempt is over, and a Fence keeps it
    from doing harm. `size` is the world size for the error. Raises CheckpointError with the other
    process if that holds the lock, and OSError if the file is a symbolic link.
    """

    def __init__(self, path: Path, *, job: str = "", attempt: int = 0, size: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lock(path)
        begun = CLOCK.now()
        while not self._take():
            waited = CLOCK.now() - begun
            holder = os.pread(self._file, 500, 0).decode(errors="replace").strip()
            if waited > TAKE_OVER_SECONDS and job and _attempt_of(holder, job) < attempt:
                break
            if waited > WAIT_SECONDS:
                found = f"another Run is open in this directory: {holder}"
                fix = (
                    f"if both belong to one job (the world size here is {size}), start all its "
                    "processes with one launcher: shoal run, srun or mpirun; otherwise wait for that "
                    "Run or end it, or choose another directory: shoal.Run('runs/b', …)"
                )
                if self._take(fcntl.LOCK_SH):  # a Run would keep that out too
                    found = f"no Run is open, but a program that only reads {path.name} has locked it"
                    fix = f"end that program, or remove the file: rm {shlex.quote(str(path))}"
                self.release()
                raise CheckpointError(given=f"a Run in {path.parent}", found=found, fix=fix)
            CLOCK.sleep(0.05)
        os.ftruncate(self._file, 0)
        mine = f"process {os.getpid()} on {socket.gethostname()}"
        mine += f", attempt {attempt} of {job}" if job else ""
        os.pwrite(self._file, f"{mine}\n".encode(), 0)

    def _take(self, kind: int = fcntl.LOCK_EX) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _attempt_of(holder: str, job: str) -> float:
    """Return the attempt of `job` that holds a lock; infinity if the holder belongs to another job."""
    match = re.search(r", attempt (\d+) of (\S+)$", holder)
    return int(match[1]) if match is not None and match[2] == job else math.inf
