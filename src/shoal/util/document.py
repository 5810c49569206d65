"""The contents of a report as values: sentences, numbers, tables and figures.

A `Document` is made once. `tables.print_document` writes it to a terminal, `to_json` returns its plain
values, and `shoal.tools.report.html` makes an HTML page of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

Fill: TypeAlias = tuple[str, str]
"""The colour of an area, and the hatch on it."""


@dataclass(frozen=True, kw_only=True)
class DocumentBlock:
    """A part of a document; `only` restricts it to the terminal or to the page."""

    only: Literal["", "terminal", "page"] = ""


@dataclass(frozen=True, kw_only=True)
class Text(DocumentBlock):
    """A paragraph; `advice` is the next action or command.

    With `whole`, a terminal does not wrap it, so that a path or a command in it can be copied.
    """

    text: str
    advice: str = ""
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class KeyNumbers(DocumentBlock):
    """Names and values."""

    pairs: Sequence[tuple[str, str]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Table(DocumentBlock):
    """Rows of strings. Empty columns are not shown, and a table without rows neither.

    The columns in `right` hold numbers, the cells of those in `whole` stay on one line. If a table is
    wider than a terminal of less than 100 columns, this omits columns in `wide`, the last one first.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    whole: Sequence[str] = ()
    wide: Sequence[str] = ()

    @property
    def lines(self) -> list[Sequence[str]]:
        """The head and the rows."""
        return [self.head, *self.rows]

    def without(self, columns: Collection[str] = ()) -> Table:
        """Return the table without these columns and without empty ones."""
        kept = [
            place
            for place, name in enumerate(self.head)
            if name not in columns and any(row[place] for row in self.rows)
        ]
        head, *rows = ([line[place] for place in kept] for line in self.lines)
        return replace(self, head=head, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line: its points, and the bounds of its band. None is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    points: bool = False
    """Mark each point, for few points."""
    faint: bool = False
    """Dashed and grey, for a reference such as the ideal."""


@dataclass(frozen=True, kw_only=True)
class LinePlot:
    """Lines; `zero` starts the y axis at 0, `ticks` are the ticks of the x axis."""

    series: Sequence[Series]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    ticks: Sequence[float] | None = None
    zero: bool = False
    band: tuple[str, str] = ("minimum", "maximum")
    """The names of the bounds of the bands."""

    def table(self) -> Table:
        """Return the points as a table."""
        bands = any(each.low is not None for each in self.series)
        rows = [
            (each.label, *map(_number, point))
            for each in self.series
            for point in zip(each.x, each.y, *_bounds(each, bands), strict=True)
        ]
        numbers = (self.x, self.y, *(self.band if bands else ()))
        return Table(caption="As drawn.", head=("line", *numbers), rows=rows, right=numbers)


@dataclass(frozen=True, kw_only=True)
class BarPlot:
    """A bar for each label, of parts laid end to end; `of` says what the labels are.

    `fills` has a fill for each part; by default, colours differ by place. `limit` is the label and the
    place of a vertical line.
    """

    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    x: str
    of: str
    fills: Mapping[str, Fill] | None = None
    limit: tuple[str, float] | None = None

    def table(self) -> Table:
        """Return the values as a table."""
        rows = [
            (label, *(_number(values[place]) for values in self.parts.values()))
            for place, label in enumerate(self.labels)
        ]
        head = (self.of, *self.parts)
        return Table(caption=f"{self.x}, as drawn.", head=head, rows=rows, right=head[1:])


@dataclass(frozen=True, kw_only=True)
class SpanPlot:
    """A row for each label, with its spans: the kind, the start and the end of each."""

    labels: Sequence[str]
    spans: Sequence[Sequence[tuple[str, float, float]]]
    x: str
    of: str

    @property
    def kinds(self) -> list[str]:
        """The kinds of spans, in order of appearance."""
        return list(dict.fromkeys(kind for row in self.spans for kind, *_ in row))

    def table(self) -> Table:
        """Return the sums of each kind as a table."""
        end = max((stop for row in self.spans for *_, stop in row), default=0.0)
        rows = []
        for label, row in zip(self.labels, self.spans, strict=True):
            sums = [sum(stop - start for own, start, stop in row if own == kind) for kind in self.kinds]
            rows.append((label, *map(_number, [*sums, max(0.0, end - sum(sums))])))
        head = (self.of, *self.kinds, "waiting")
        return Table(caption=f"{self.x}, as drawn.", head=head, rows=rows, right=head[1:])


@dataclass(frozen=True, kw_only=True)
class AreaPlot:
    """Stacked areas of parts."""

    xs: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    x: str
    y: str
    fills: Mapping[str, Fill] | None = None

    def table(self) -> Table:
        """Return the values as a table."""
        rows = [[*map(_number, row)] for row in zip(self.xs, *self.parts.values(), strict=True)]
        head = (self.x, *self.parts)
        return Table(caption=f"{self.y}, as drawn.", head=head, rows=rows, right=head)


Drawing: TypeAlias = LinePlot | BarPlot | SpanPlot | AreaPlot


@dataclass(frozen=True, kw_only=True)
class Figure(DocumentBlock):
    """A drawing, and the same numbers as a table for readers who can't see it.

    `name` is the name of its files, without suffix; it is unique within a document. A terminal shows
    only the first bar of a `BarPlot`.
    """

    name: str
    caption: str
    drawing: Drawing
    only: Literal["", "terminal", "page"] = "page"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and the blocks below it. A terminal shows no headings."""

    heading: str = ""
    blocks: Sequence[DocumentBlock]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Title, verdict in one sentence, sections, and the values of which JSON is made."""

    title: str
    verdict: str = ""
    sections: Sequence[Section]
    values: object = None
    about: str = ""

    def shown(self, where: Literal["terminal", "page"]) -> list[tuple[str, list[DocumentBlock]]]:
        """Return the headings and the blocks to show there, without empty ones."""
        sections = [(each.heading, [*_shown(each.blocks, where)]) for each in self.sections]
        return [(heading, blocks) for heading, blocks in sections if blocks]

    def figures(self) -> list[Figure]:
        """Return the figures of the page."""
        blocks = [block for _, blocks in self.shown("page") for block in blocks]
        return [block for block in blocks if isinstance(block, Figure)]


def to_json(document: Document) -> str:
    """Return the values of a document as JSON, with null in place of NaN and infinity."""
    return json.dumps(to_plain(document.values), indent=2, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Return dataclasses, mappings, sequences, enums, paths and numbers as JSON holds them."""
    if isinstance(value, Enum):
        return to_plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and their scalars
        return to_plain(value.tolist())
    return [to_plain(item) for item in value]


def _bounds(series: Series, bands: bool) -> list[Sequence[float | None]]:
    return [given or [None] * len(series.x) for given in (series.low, series.high)] if bands else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def _shown(blocks: Sequence[DocumentBlock], where: str) -> Iterator[DocumentBlock]:
    for block in blocks:
        if block.only not in ("", where):
            continue
        if not isinstance(block, Table):
            yield block
        elif block.rows:
            yield block.without()
