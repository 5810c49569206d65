"""Hooks of mkdocs: the order of the search, and the line breaks in code."""

from __future__ import annotations

import re
from typing import Any

LAST = ("contributing/", "design/", "reference/cli/", "reference/python/")
CODE = re.compile(r"(?<!<span></span><code>)(?<=<code>)[^<]+(?=</code>)")  # not in a <pre>
WORD = re.compile(r"(?<!\S)\S{1,40}(?!\S)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lower the weight of a contributors' page and of a reference in the search index."""
    if page.file.src_uri.startswith(LAST):
        page.meta["search"] = {"boost": 0.2}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Mark the words of inline code, because browsers break lines after each hyphen."""
    return CODE.sub(lambda code: WORD.sub(r'<span class="word">\g<0></span>', code[0]), html)
