"""HTML pages of documents: one self-contained file, and its figures as files next to it.

A page needs no network and no script. `plots` draws the figures with matplotlib, which is imported when
a page has one.
"""

from __future__ import annotations

from shoal.tools.report.html.page import save_page, to_csv, write_csv

__all__ = ["save_page", "to_csv", "write_csv"]
