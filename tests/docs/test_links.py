"""The links of all pages, offline: files and anchors exist, and outside addresses are well-formed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?\)")
HOST = re.compile(r"(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z]{2,}")


def text_of(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"``[^`]+``|`[^`]*`", "`", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown and the forges make them."""
    found = set(re.findall(r'id="([^"]+)"|\{#([^}]+)\}', page.read_text()))
    names = {name for pair in found for name in pair if name}
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
        names.add(re.sub(r"\s+", "-", words))
        names.add(re.sub(r"[-\s]+", "-", words))
    return names


def broken_links(page: Path) -> Iterator[str]:
    """Yield each link of a page that leads nowhere or has a malformed address."""
    for link in LINK.findall(text_of(page)):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if parts.scheme != "https" or not HOST.fullmatch(parts.hostname or ""):
                yield link
            continue
        target = page if not parts.path else page.parent / parts.path
        name = parts.fragment
        # The names of the API are anchors of the built site alone, whose build checks them.
        known = not name or name.startswith("shoal.") or target.suffix != ".md"
        if not target.exists() or not (known or name in anchors(target)):
            yield link


def test_links_lead_somewhere(repository: Path) -> None:
    pages = [
        *repository.glob("*.md"),
        *(repository / "docs").rglob("*.md"),
        *repository.glob("examples/*.md"),
    ]
    broken = {
        f"{page.relative_to(repository)}: {link}" for page in pages for link in broken_links(page)
    }
    assert broken == set()


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: `x`\n\n[good](#a-title-x) [gone](#other) [no file](gone.md)\n"
        "[plain](http://example.org) [typing error](https://example,org) [fine](https://example.org/a_(b))\n"
        "`[code](gone.md)`\n"
    )
    assert list(broken_links(page)) == [
        "#other",
        "gone.md",
        "http://example.org",
        "https://example,org",
    ]
