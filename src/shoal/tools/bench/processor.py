"""The name of this machine's processor."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processor_name() -> str:
    """Return the model of the first core; empty if the kernel does not report it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""
