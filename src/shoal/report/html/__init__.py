"""Pages for people who read in a browser: one HTML file from plain values, with figures.

A page needs no network and no script. Its figures are drawn by `plots`, which imports matplotlib; the
rest does without.
"""

from __future__ import annotations

from shoal.report.html.csv import to_csv, write_csv
from shoal.report.html.page import (
    Block,
    Drawing,
    Facts,
    Figure,
    Page,
    Section,
    Table,
    Text,
    render_page,
)
from shoal.report.html.save import save_page

__all__ = [
    "Block",
    "Drawing",
    "Facts",
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
