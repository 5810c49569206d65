"""Tables for the terminal: no colours, no truncated text, as many columns as there are.

All text goes through `printable` and never through markup, since names may come from files that another
user wrote.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.util.safe_text import printable

_NARROW = 14


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or stderr, without styles: it may be a file or a pipe."""
    return Console(color_system=None, highlight=False, stderr=stderr)


def make_table(*headers: str, right: Collection[str] = ()) -> Table:
    """Return an empty table; the columns in `right` contain numbers."""
    table = Table(box=box.SIMPLE_HEAD if any(headers) else None, pad_edge=False, show_edge=False)
    for header in headers:
        # Words longer than a column are folded, since truncated text could be what a user looks for.
        justify = "right" if header in right else "left"
        table.add_column(header, overflow="fold", justify=justify)  # type: ignore[arg-type]
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of strings."""
    table.add_row(*(as_text(cell) for cell in cells))


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a title, a table and an empty line."""
    print_path(console, title)
    console.print(table)
    console.print()


def print_rows(
    console: Console,
    title: str,
    headers: Sequence[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Collection[str] = (),
) -> None:
    """Print a title, a table with these rows of strings, and an empty line."""
    table = make_table(*headers, right=right)
    for row in rows:
        add_row(table, *row)
    print_table(console, title, table)


def print_pairs(console: Console, title: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    table = make_table("", "")
    table.show_header = False
    # Most names are short; a narrow terminal must leave room for the values.
    table.columns[0].max_width = max(_NARROW, console.width // 3)
    for pair in pairs:
        add_row(table, *pair)
    print_table(console, title, table)


def rendered(print_to: Callable[[Console], None], width: int) -> str:
    """Return what a function prints to a console of this width."""
    file = io.StringIO()
    print_to(Console(file=file, width=width, color_system=None, highlight=False))
    return file.getvalue()


def print_line(console: Console, *texts: str) -> None:
    """Print strings, each on a separate line."""
    for text in texts:
        console.print(as_text(text), overflow="fold")


def print_path(console: Console, text: str) -> None:
    """Print a line with a path in it without wrapping, so that users can find and copy the path."""
    console.print(as_text(text), soft_wrap=True)


def as_text(text: str) -> Text:
    """Return text without markup: `node[01-03]` is not markup."""
    return Text(printable(text))
