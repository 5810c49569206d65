"""A document as one HTML file, and its figures as further files."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.tools.report.html.plots import Plot, draw
from shoal.util.document import Document
from shoal.util.errors import LaunchError, raised_as
from shoal.util.regular_file import appearing
from shoal.util.safe_text import printable


def save_page(document: Document, path: Path, *, option: str) -> list[Path]:
    """Write a document as HTML to `path`, and next to it each figure as PNG, SVG and CSV.

    The directory is created if necessary. Returns all paths. Raises LaunchError, with the command-line
    option that sets the path, if it can't be written.
    """
    files: dict[Path, bytes] = {}
    with raised_as(
        LaunchError, given=f"a page in {path}", fix=f"write where you have permission: {option}"
    ):
        path.parent.mkdir(parents=True, exist_ok=True)  # before drawing the figures, which is slow
        plots = {figure.name: draw(figure.drawing) for figure in document.figures()}
        for figure in document.figures():
            plot, table = plots[figure.name], to_csv(figure.drawing.table().lines)
            parts = {"png": plot.png, "svg": plot.svg.encode(), "csv": table.encode()}
            files |= {path.with_name(f"{figure.name}.{end}"): part for end, part in parts.items()}
        for file, content in (files | {path: render_page(document, plots).encode()}).items():
            with appearing(file) as partial:
                partial.write_bytes(content)
    return [path, *files]


def render_page(document: Document, plots: Mapping[str, Plot]) -> str:
    """Return the document as one HTML file. All strings are escaped; only drawings are not."""
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
        "base64": lambda content: base64.b64encode(content).decode(),
        "csv": lambda table: to_csv(table.lines).encode(),
    }
    here = resources.files(__package__)
    template = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    return template.render(
        page=document, sections=document.shown("page"), plots=plots, style=Markup(style)
    )


def _shown(value: object) -> object:
    # Only drawings and the style are markup already.
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _inline(svg: str, prefix: str) -> Markup:
    """Return a drawing as a part of the page, with ids that are unique in it."""
    return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg))


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; the first row has the names of the columns.

    A string that a spreadsheet would interpret as a formula gets an apostrophe in front.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_harmless(row) for row in rows)
    return text.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, all with the columns of the first, as CSV. Raises LaunchError if that fails."""
    with raised_as(LaunchError, given=f"the table {path}", fix="use another file"):
        path.write_text(to_csv([list(rows[0]), *(list(row.values()) for row in rows)]))


def _harmless(row: Sequence[object]) -> list[object]:
    return [f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell for cell in row]


def _is_formula(cell: str) -> bool:
    if cell[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
