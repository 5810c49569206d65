"""Hooks of mkdocs: in the search, the pages for users come before those for contributors."""

from __future__ import annotations

from typing import Any

CONTRIBUTORS = ("contributing/", "design/")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lower the weight of a contributors' page in the search index."""
    if page.file.src_uri.startswith(CONTRIBUTORS):
        page.meta["search"] = {"boost": 0.2}
    return markdown
