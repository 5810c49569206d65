"""Figures as people read them: the same words in the terminal, on the page and in CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from .figures import Row, Spread
from .grid import NONE
from .measured import PARTS

HEAD = (
    "processes",
    "batch",
    "{unit}/s",
    "ms a step",
    "sync ms",
    "speed-up",
    "efficiency",
    "repeats",
)
"""Of the table of a curve."""


def head(unit: str) -> tuple[str, ...]:
    """The columns of a curve's table."""
    return tuple(name.format(unit=unit) for name in HEAD)


def cells(row: Row, each: int) -> tuple[str, ...]:
    """A row of a curve's table; `each` is how many units a sample is."""
    begin = (str(row.processes), f"{row.configuration.batch:,}")
    many = f"{row.repeats}" + (f", {row.failed} failed" if row.failed else "")
    if not (row.rate and row.iteration and row.speedup and row.efficiency):
        return (*begin, "failed", "", "", "", "", many)
    return (
        *begin,
        ranged(row.rate, each),
        ranged(row.iteration, 1e3),
        number(row.synchronisation * 1e3),
        ranged(row.speedup),
        ranged(row.efficiency, 100, " %"),
        many,
    )


def ranged(value: Spread, scale: float = 1.0, mark: str = "") -> str:
    """The median, and between which two the others lie."""
    low, middle, high = (number(each * scale) for each in (value.low, value.median, value.high))
    return f"{middle}{mark}" if low == high else f"{middle}{mark} ({low} to {high})"


def number(value: float) -> str:
    """Three digits that say something, or all before the point."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


FIELDS = ("scaling", "backend", "strategy", "precision", "way")
SPREADS = ("rate", "iteration", "speedup", "efficiency")


def table(rows: Sequence[Row], unit: str, each: int) -> str:
    """All rows as CSV: medians with low and high, rates in `unit` per second, times in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = [name if name != "rate" else f"{unit}_per_second" for name in SPREADS]
    ranges = [f"{name}{end}" for name in spreads for end in ("", "_low", "_high")]
    rest = ("synchronisation", *PARTS, "repeats", "failed", "reason", "notes")
    writer.writerow((*FIELDS, "processes", "batch", *ranges, *rest))
    for row in rows:
        values: list[object] = [getattr(row.curve, name) for name in FIELDS]
        values += [row.processes, row.configuration.batch]
        for name in SPREADS:
            found: Spread | None = getattr(row, name)
            scale = each if name == "rate" else 1
            ends = (found.median, found.low, found.high) if found else ()
            values += [f"{end * scale:.6g}" for end in ends] or ["", "", ""]
        parts = row.parts or {}
        values.append(f"{row.synchronisation:.6g}" if parts else "")
        values += [f"{parts[part]:.6g}" if part in parts else "" for part in PARTS]
        values += [row.repeats, row.failed, row.reason or "", "; ".join(row.notes)]
        writer.writerow([_harmless(value) for value in values])
    return text.getvalue()


def _harmless(value: object) -> object:
    """Text that a spreadsheet would take for a formula begins with a quote."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def subtitle(row: Row) -> str:
    """What one point of a plot or table is, where its column says no more."""
    chosen = (row.configuration.backend, row.configuration.strategy)
    return ", ".join(part for part in chosen if part != NONE) or "alone"
