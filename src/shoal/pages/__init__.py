"""Pages for people who read in a browser: one HTML file from plain values, with figures.

A page needs no network and no script. Its figures are drawn by `plots`, which imports matplotlib; the
rest does without.
"""

from __future__ import annotations

from .page import Block, Drawing, Facts, Figure, Page, Section, Table, Text, render
from .saving import save
from .tabular import csv_of

__all__ = [
    "Block",
    "Drawing",
    "Facts",
    "Figure",
    "Page",
    "Section",
    "Table",
    "Text",
    "csv_of",
    "render",
    "save",
]
