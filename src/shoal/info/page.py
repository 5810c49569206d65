"""The tables that people read: no colours, no cut text, in as many columns as there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.choice import Choice
from shoal.info.machine import Machine, Rows
from shoal.info.ranks import Rank, differences, rows

_NARROW = 14


def machine(console: Console, found: Machine) -> None:
    """What this machine has."""
    _pairs(console, "Versions", found.versions)
    _pairs(console, "Hardware, as this process may use it", found.hardware)
    _pairs(console, "Optional packages", found.packages)
    _pairs(
        console, "Launchers on PATH", found.programs or [("none", "shoal run -n N SCRIPT needs none")]
    )


def launchers(console: Console, variables: Mapping[str, str]) -> None:
    """The launchers that are asked, in order, each with what was found of its variables."""
    _pairs(
        console,
        "Launchers, as they are asked, and their variables here",
        [(name, found or "none") for name, found in variables.items()],
    )


def choices(console: Console, made: Sequence[Choice[object]]) -> None:
    """What was chosen, why, and what was not."""
    table = _table("what", "chosen", "why, and why not")
    table.columns[1].max_width = max(_NARROW, console.width // 4)
    for choice in made:
        whys = [choice.reason, *(f"not {name}: {why}" for name, why in choice.rejected.items())]
        for index, why in enumerate(whys):
            first = (choice.what, _spelled(choice.value)) if index == 0 else ("", "")
            _add(table, *first, why)
    _print(console, "What was chosen, and why (on rank 0)", table)


def ranks(console: Console, found: Sequence[Rank]) -> None:
    """All ranks, and where they differ."""
    table = _table("rank", "host", "local", "cores", "threads", "device")
    for row in rows(found):
        _add(table, *row)
    _print(console, f"{len(found)} ranks", table)
    lines = list(differences(found)) or ["Shoal, Python and torch are the same on all."]
    console.print(Text("\n".join(lines)))


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_spelled, value)) or "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _pairs(console: Console, title: str, pairs: Rows) -> None:
    table = _table("", "")
    table.show_header = False
    # Names are short but for some; a narrow screen belongs to what was found.
    table.columns[0].max_width = max(_NARROW, console.width // 3)
    for pair in pairs:
        _add(table, *pair)
    _print(console, title, table)


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if any(headers) else None, pad_edge=False, show_edge=False)
    for header in headers:
        # Longer words than a column are folded: text that is cut may be what somebody looks for.
        table.add_column(header, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    # As Text: `node[01-03]` is no markup.
    table.add_row(*(Text(cell) for cell in cells))


def _print(console: Console, title: str, table: Table) -> None:
    console.print(Text(title))
    console.print(table)
    console.print()
