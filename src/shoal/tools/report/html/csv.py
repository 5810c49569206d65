"""Tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shoal.util.errors import LaunchError


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; the first row has the names of the columns.

    A string that a spreadsheet would interpret as a formula gets an apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_harmless(row) for row in rows)
    return text.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, all with the columns of the first, to a CSV file.

    Raises LaunchError if that fails.
    """
    try:
        path.write_text(to_csv([list(rows[0]), *(list(row.values()) for row in rows)]))
    except OSError as error:
        raise LaunchError(
            given=f"the table {path}", found=f"{error.strerror}", fix="use another file"
        ) from None


def _harmless(row: Sequence[object]) -> list[object]:
    return [f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell for cell in row]


def _is_formula(cell: str) -> bool:
    if cell[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
