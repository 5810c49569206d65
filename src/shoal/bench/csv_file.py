"""Figures as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.util.errors import LaunchError


def write_rows(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows, of which the first has the names. LaunchError where that can't be."""
    try:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    except OSError as error:
        raise LaunchError(
            given=f"--csv {path}", found=f"{error.strerror}", fix="give another file"
        ) from None
