"""Tables as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Protocol


class Tabular(Protocol):
    """Anything with a head and rows of texts."""

    @property
    def head(self) -> Sequence[str]:
        """The names of the columns."""

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        """The cells, row by row."""


def csv_of(table: Tabular) -> str:
    """The table as CSV. What a spreadsheet would take for a formula gets an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_harmless, table.head))
    writer.writerows(map(_harmless, row) for row in table.rows)
    return text.getvalue()


def _harmless(cell: str) -> str:
    if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not _is_number(cell):
        return f"'{cell}"
    return cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
