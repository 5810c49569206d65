"""The report as text for the terminal."""

from __future__ import annotations

from rich.console import Console

from shoal.tools.doctor.findings import Examination, Severity
from shoal.util.tables import plain_console, print_line, print_rows, rendered

_COLUMNS = 100
_MARKS = {Severity.OK: "ok", Severity.WARNING: "WARNING", Severity.FAILURE: "FAILURE"}


def print_examination(console: Console, found: Examination) -> None:
    """Print the verdict, then a line for each check, the gravest first."""
    rows: list[tuple[str, str, str]] = []
    for one in found.findings:
        rows.append((_MARKS[one.state], one.what, one.found))
        if one.fix:
            rows.append(("", "", f"→ {one.fix}"))
    headers = ("", "check", "result and remedy")
    print_rows(console, f"shoal doctor: {found.verdict()}", headers, rows)


def examination_text(found: Examination) -> str:
    """Return the report as text for a file."""
    return rendered(lambda console: print_examination(console, found), _COLUMNS)


def print_progress(*lines: str) -> None:
    """Print progress lines on stderr, apart from the report."""
    print_line(plain_console(stderr=True), *lines)
