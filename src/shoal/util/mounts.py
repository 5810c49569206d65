"""The file system of a directory."""

from __future__ import annotations

from pathlib import Path

import psutil


def mount_of(folder: Path) -> tuple[str, str]:
    """Return the kind of the file system, as in the list of mounts, and where it is mounted."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    real = folder.resolve()
    found = next((one for one in (real, *real.parents) if one in mounts), real)
    return mounts.get(found, "unknown"), str(found)
