"""HTML pages from plain values: one self-contained file with figures.

A page needs no network and no script. `plots` draws its figures and imports matplotlib; the other
modules do not need it.
"""

from __future__ import annotations

from shoal.tools.report.html.csv import to_csv, write_csv
from shoal.tools.report.html.page import (
    Block,
    Figure,
    KeyNumbers,
    Page,
    Plot,
    Section,
    Table,
    Text,
    render_page,
)
from shoal.tools.report.html.save import save_page

__all__ = [
    "Block",
    "Plot",
    "KeyNumbers",
    "Figure",
    "Page",
    "Section",
    "Table",
    "Text",
    "to_csv",
    "render_page",
    "save_page",
    "write_csv",
]
