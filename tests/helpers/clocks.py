"""A clock that tests advance, and a wall clock that is wrong, for the processes of a command."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_offset.c")


class ManualClock:
    """A `shoal.util.clock.Clock` that advances if it sleeps or waits, or if a test sets it."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def now(self) -> float:
        return self.nanoseconds / 1e9

    def now_ns(self) -> int:
        return self.nanoseconds

    def wall(self) -> float:
        return self.now()

    def sleep(self, seconds: float) -> None:
        self.nanoseconds += round(seconds * 1e9)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.sleep(seconds)
        return event.is_set()


class WrongClock:
    """`variables` let a command's processes have a wall clock that is `seconds` ahead. Needs `cc`."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self._offset, shim = folder / "clock-offset", folder / "clock_offset.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(_SOURCE)], check=True)
        self.set(seconds)
        self.variables = {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock, also of processes that run: they have mapped the file."""
        descriptor = os.open(self._offset, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, struct.pack("q", seconds))
        os.close(descriptor)
