"""Commands that start processes, for tests of how these end: none is left unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GONE_WITHIN = 300.0
"""Seconds that only stop a test. Idle machines take one or two; processes that nobody ends stay for
longer: other graces and time limits are set beyond it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is left of a command."""

    code: int
    out: str
    err: str


class Command:
    """A command in a session and a temporary directory of its own."""

    def __init__(self, command: Sequence[str], folder: Path, *, stdout: int = subprocess.PIPE) -> None:
        self.folder = folder
        # Not in the folder, whose name may be too long for sockets.
        self._temporary = tempfile.TemporaryDirectory(prefix="shoal-")
        self.temporary = Path(self._temporary.name)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHONUNBUF"))}
        self.process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env={**env, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )

    def end(self, timeout: float = GONE_WITHIN) -> Ended:
        out, err = self.process.communicate(timeout=timeout)
        return Ended(code=self.process.returncode, out=out, err=err)

    def members(self) -> list[int]:
        """Its processes, wherever in the tree they are: known by their directory."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("TMPDIR") == str(self.temporary):
                    found.append(process.pid)
        return found

    def wait_ready(self, ranks: int) -> None:
        wait_for(lambda: all((self.folder / f"ready{rank}").exists() for rank in range(ranks)))

    def clean_up(self) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)


def wait_for(
    condition: Callable[[], bool],
    timeout: float = GONE_WITHIN,
    *,
    every: float = 0.01,
    told: Callable[[], str] = lambda: "the condition did not come true",
) -> None:
    """Look every so many seconds; a failure says what `told` gives then."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(told())
        time.sleep(every)
