"""A document as one HTML file."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shoal.tools.report.html.csv import to_csv
from shoal.tools.report.html.plots import Plot
from shoal.util.document import Document
from shoal.util.safe_text import printable


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
