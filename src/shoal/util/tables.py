"""Documents and tables on the terminal: no colours, no truncated text.

All text goes through `printable` and never through markup, since names may come from files that another
user wrote.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from shoal.util.document import BarPlot, Document, DocumentBlock, Figure, KeyNumbers, Text
from shoal.util.document import Table as Rows
from shoal.util.safe_text import printable

_NARROW = 14
_WIDE, _UNBOUNDED = 100, 100_000
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
            table = _table(block.pairs, "", "")
            # Most names are short; a narrow terminal must leave room for the values.
            table.columns[0].max_width = max(_NARROW, console.width // 3)
            _print_table(console, block.caption, table)
        case Rows():
            _print_table(console, block.caption, _fitting_table(console, block))
        case Figure(drawing=BarPlot() as plot):
            _print_bars(console, block.caption, plot)


def _fitting_table(console: Console, block: Rows) -> Table:
    least = 0 if console.width < _WIDE else len(block.wide)
    free = console.options.update(width=_UNBOUNDED)
    for kept in range(len(block.wide), -1, -1):
        shown = block.without(block.wide[kept:])
        table = _table(shown.rows, *shown.head, right=block.right, whole=block.whole)
        if kept == least or console.measure(table, options=free).maximum <= console.width:
            break
    return table


def _print_bars(console: Console, caption: str, plot: BarPlot) -> None:
    values = {name: found[0] for name, found in plot.parts.items()}
    most = plot.limit[1] if plot.limit else sum(values.values())
    lengths = [round(_BAR * min(1.0, value / most)) if most else 0 for value in values.values()]
    cells = [row[1] for row in zip(plot.table().head, plot.table().rows[0], strict=True)][1:]
    rows = [
        (name, cell, "#" * (length or (value > most / 1000)))
        for (name, value), cell, length in zip(values.items(), cells, lengths, strict=True)
    ]
    _print_table(console, caption, _table(rows, "part", plot.x, "", right=(plot.x,)))


def _table(
    rows: Iterable[Iterable[str]],
    *headers: str,
    right: Collection[str] = (),
    whole: Collection[str] = (),
) -> Table:
    head = box.SIMPLE_HEAD if any(headers) else None
    table = Table(box=head, show_header=head is not None, pad_edge=False, show_edge=False)
    for header in headers:
        # Words longer than a column are folded, since truncated text could be what a user looks for.
        justify = "right" if header in right else "left"
        table.add_column(header, overflow="fold", justify=justify, no_wrap=header in whole)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(_as_text, row))
    return table


def _print_table(console: Console, title: str, table: Table) -> None:
    if title:
        print_path(console, title)
    console.print(table)
    console.print()


def rendered(document: Document, width: int) -> str:
    """Return a document as a terminal of this width shows it."""
    file = io.StringIO()
    print_document(Console(file=file, width=width, color_system=None, highlight=False), document)
    return file.getvalue()


def print_line(console: Console, *texts: str) -> None:
    """Print strings, each on a separate line."""
    for text in texts:
        console.print(_as_text(text), overflow="fold")


def print_path(console: Console, text: str) -> None:
    """Print a line with a path in it without wrapping, so that users can find and copy the path."""
    console.print(_as_text(text), soft_wrap=True)


def _as_text(text: str) -> RichText:
    # Without markup: `node[01-03]` is a name.
    return RichText(printable(text))
