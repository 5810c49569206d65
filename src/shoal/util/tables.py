"""Documents and tables on the terminal: no colours, no truncated text.

All text goes through `printable` and never through markup, since names may come from files that another
user wrote.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from shoal.util.document import BarPlot, Document, DocumentBlock, Figure, KeyNumbers, Text
from shoal.util.document import Table as Rows
from shoal.util.safe_text import printable

_NARROW = 14
_WIDE = 100
_BAR = 30


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or stderr, without styles: it may be a file or a pipe."""
    return Console(color_system=None, highlight=False, stderr=stderr)


def print_document(console: Console, document: Document) -> None:
    """Print the verdict and the blocks of a document."""
    print_line(console, *([document.verdict, ""] if document.verdict else []))
    blocks = [block for _, blocks in document.shown("terminal") for block in blocks]
    for place, block in enumerate(blocks):
        _print_block(console, block)
        if isinstance(block, Text) and not isinstance((*blocks, block)[place + 1], Text):
            console.print()


def _print_block(console: Console, block: DocumentBlock) -> None:
    match block:
        case Text():
            (print_path if block.whole else print_line)(console, block.text)
            if block.advice:
                print_line(console, f"    {block.advice}")
        case KeyNumbers():
            print_pairs(console, block.caption, block.pairs)
        case Rows():
            shown = block.without(() if console.width >= _WIDE else block.wide)
            print_rows(
                console, block.caption, shown.head, shown.rows, right=block.right, whole=block.whole
            )
        case Figure(drawing=BarPlot() as plot):
            _print_bars(console, block.caption, plot)


def _print_bars(console: Console, caption: str, plot: BarPlot) -> None:
    values = {name: found[0] for name, found in plot.parts.items()}
    most = plot.limit[1] if plot.limit else sum(values.values())
    lengths = [round(_BAR * min(1.0, value / most)) if most else 0 for value in values.values()]
    cells = [row[1] for row in zip(plot.table().head, plot.table().rows[0], strict=True)][1:]
    rows = [
        (name, cell, "#" * (length or (value > most / 1000)))
        for (name, value), cell, length in zip(values.items(), cells, lengths, strict=True)
    ]
    print_rows(console, caption, ("part", plot.x, ""), rows, right=(plot.x,))


def make_table(*headers: str, right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """Return an empty table; columns in `right` contain numbers, those in `whole` are not folded."""
    table = Table(box=box.SIMPLE_HEAD if any(headers) else None, pad_edge=False, show_edge=False)
    for header in headers:
        # Words longer than a column are folded, since truncated text could be what a user looks for.
        justify = "right" if header in right else "left"
        table.add_column(header, overflow="fold", justify=justify, no_wrap=header in whole)  # type: ignore[arg-type]
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of strings."""
    table.add_row(*(as_text(cell) for cell in cells))


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a title, if there is one, a table and an empty line."""
    if title:
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
    whole: Collection[str] = (),
) -> None:
    """Print a title, a table with these rows of strings, and an empty line."""
    table = make_table(*headers, right=right, whole=whole)
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


def rendered(document: Document, width: int) -> str:
    """Return a document as a terminal of this width shows it."""
    file = io.StringIO()
    print_document(Console(file=file, width=width, color_system=None, highlight=False), document)
    return file.getvalue()


def print_line(console: Console, *texts: str) -> None:
    """Print strings, each on a separate line."""
    for text in texts:
        console.print(as_text(text), overflow="fold")


def print_path(console: Console, text: str) -> None:
    """Print a line with a path in it without wrapping, so that users can find and copy the path."""
    console.print(as_text(text), soft_wrap=True)


def as_text(text: str) -> RichText:
    """Return text without markup: `node[01-03]` is not markup."""
    return RichText(printable(text))
