"""The contents of a page as plain values, and their HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.tools.report.html.csv import to_csv
from shoal.util.safe_text import printable


@dataclass(frozen=True, kw_only=True)
class Text:
    """A paragraph; `advice` is the next action or command."""

    text: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class KeyNumbers:
    """The key numbers at the top: names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of strings. The columns listed in `right` hold numbers."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()

    @property
    def lines(self) -> list[Sequence[str]]:
        """The head and the rows."""
        return [self.head, *self.rows]


@dataclass(frozen=True)
class Plot:
    """A figure drawn by `plots`: for the page, wide and for a phone; and as files."""

    wide: str
    narrow: str
    svg: str
    png: bytes


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing with the same numbers as a table, for readers who can't see it.

    `name` is the name of its files, without suffix; it is unique within a page.
    """

    name: str
    caption: str
    drawing: Plot
    table: Table


Block: TypeAlias = Text | KeyNumbers | Table | Figure


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and the blocks below it."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its title, the verdict in one sentence, and the sections."""

    title: str
    verdict: str
    sections: Sequence[Section]
    about: str = ""


def render_page(page: Page) -> str:
    """Return the page as one HTML file. All strings are escaped; only drawings are not."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "inline": _inline,
        "data": _data,
    }
    here = resources.files(__package__)
    template = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    return template.render(page=page, style=Markup(style))


def _shown(value: object) -> object:
    # Only drawings and the style are markup already.
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _inline(svg: str, prefix: str) -> Markup:
    """Return a drawing as a part of the page, with ids that are unique in it."""
    return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg))


def _data(figure: Figure, kind: str) -> str:
    """Return a file of a figure as a data URL for download."""
    if kind == "png":
        return "data:image/png;base64," + base64.b64encode(figure.drawing.png).decode()
    return "data:text/csv;base64," + base64.b64encode(to_csv(figure.table.lines).encode()).decode()
