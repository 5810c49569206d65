"""The report as people read it."""

from __future__ import annotations

import io

from rich.console import Console

from shoal.doctor.findings import Examination, Severity
from shoal.util.tables import add_row, make_table, plain_console, print_line, print_table

_COLUMNS = 100
_MARKS = {Severity.OK: "ok", Severity.WARNING: "WARNING", Severity.FAILURE: "FAILURE"}


def show(console: Console, found: Examination) -> None:
    """The verdict, then a line for each check, the gravest first."""
    table = make_table("", "what", "found, and what to type")
    for one in found.findings:
        add_row(table, _MARKS[one.state], one.what, one.found)
        if one.fix:
            add_row(table, "", "", f"→ {one.fix}")
    print_table(console, f"shoal doctor: {found.verdict()}", table)


def text(found: Examination) -> str:
    """The report as a file holds it."""
    console = Console(file=io.StringIO(), width=_COLUMNS, color_system=None, highlight=False)
    show(console, found)
    return console.file.getvalue() if isinstance(console.file, io.StringIO) else ""


def tell(*lines: str) -> None:
    """Lines beside the report, on stderr."""
    print_line(plain_console(stderr=True), *lines)
