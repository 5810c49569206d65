"""A wall clock that is wrong, for the processes of a command; needs a C compiler."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_offset.c")


class WrongClock:
    """`variables` let a command's processes have a wall clock that is `seconds` ahead."""

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
