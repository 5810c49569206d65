"""The runs that the user has submitted, wherever they are: one absolute path in each line of a file."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.distributed import env_vars

MOST = 50
"""So many runs are listed at most, the newest ones."""


def path() -> Path:
    """The file of the list."""
    return env_vars.state_folder() / "runs"


def add(run: Path) -> None:
    """Add a run at the end; several submissions at once don't disturb each other. Raises OSError."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, os.fsencode(f"{run.resolve()}\n"))
    finally:
        os.close(descriptor)


def submitted_runs() -> list[Path]:
    """The runs, the one that was submitted last first, each once."""
    try:
        lines = os.fsdecode(path().read_bytes()).split("\n")
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(reversed(lines)) if os.path.isabs(line)]
