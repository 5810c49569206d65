"""The list of the runs that the user has submitted: one absolute path per line of a file."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.distributed import env_vars

MOST = 50
"""Largest number of runs that are listed, the newest ones."""


def path() -> Path:
    """Return the path of the list."""
    return env_vars.state_folder() / "runs"


def add(run: Path) -> None:
    """Append a run; simultaneous submissions do not interfere. Raises OSError."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, os.fsencode(f"{run.resolve()}\n"))
    finally:
        os.close(descriptor)


def submitted_runs() -> list[Path]:
    """Return the runs, without duplicates, the last submitted one first."""
    try:
        lines = os.fsdecode(path().read_bytes()).split("\n")
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(reversed(lines)) if os.path.isabs(line)]
