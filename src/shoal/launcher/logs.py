"""Log files with the output of each rank and its children; rank 0's is shown too."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shoal.util.clock import CLOCK, utc_now
from shoal.util.errors import LaunchError

# Longest delay of rank 0's output on the terminal, in seconds.
_SECONDS = 0.05
_PIECE = 1 << 16


class Logs:
    """The files `rank-R.log` in `folder`, one for each of `processes`, created if missing.

    With a `host`, one of several whose ranks change with each attempt, they are `HOST-N.log`. The ranks
    append to them. As a context manager it shows new content of the first file on stdout. Raises
    LaunchError if the files can't be written.
    """

    def __init__(self, folder: str, processes: int, host: str = "") -> None:
        path = Path(folder).absolute()
        self.files = [str(path / f"{host or 'rank'}-{rank}.log") for rank in range(processes)]
        self._shown = 0
        self._turn = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        try:
            path.mkdir(parents=True, exist_ok=True)
            for file in self.files:
                _append(file, "")
        except OSError as error:
            raise LaunchError(
                given=f"--logs {folder}",
                found=f"{error.filename}: {error.strerror}",
                fix="choose a writable directory, as in `--logs logs`",
            ) from None

    def begin(self, attempt: int, attempts: int, command: str) -> None:
        """Write the heading of an attempt, counted from 1."""
        now = utc_now().astimezone().isoformat(" ", "seconds")
        head = f"{now} on {socket.gethostname()}, attempt {attempt} of {attempts}: {command}"
        for rank in range(len(self.files)):
            self.append(rank, f"=== {head} ===\n")

    def append(self, rank: int, text: str) -> None:
        """Add a line of the launcher, which is not shown; earlier content is shown first."""
        with self._turn:
            self._show()
            # A full disk must not end a run whose output is lost anyway.
            with suppress(OSError):
                _append(self.files[rank], text)
                if rank == 0:
                    self._shown = os.path.getsize(self.files[0])

    def __enter__(self) -> None:
        self._shown = os.path.getsize(self.files[0])
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        over = False
        while not over:
            # Once more after the end, for the last output.
            over = CLOCK.wait(self._over, _SECONDS)
            with self._turn:
                self._show()

    def _show(self) -> None:
        if sys.stdout is None:  # started without one
            return
        for piece in _from(self.files[0], self._shown):
            self._shown += len(piece)
            # The reader may have ended.
            with suppress(OSError):
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()


def _append(file: str, text: str) -> None:
    with open(file, "a", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)


def _from(file: str, start: int) -> Iterator[bytes]:
    with suppress(FileNotFoundError), open(file, "rb") as stream:
        stream.seek(start)
        while piece := stream.read(_PIECE):
            yield piece
