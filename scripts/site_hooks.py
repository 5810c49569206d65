"""Hooks of mkdocs: in the search, guides come before pages for contributors and references."""

from __future__ import annotations

from typing import Any

LAST = ("contributing/", "design/", "reference/cli/", "reference/python/")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lower the weight of a contributors' page and of a reference in the search index."""
    if page.file.src_uri.startswith(LAST):
        page.meta["search"] = {"boost": 0.2}
    return markdown
