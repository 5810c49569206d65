"""A page and its figures as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.tools.report.html.csv import to_csv
from shoal.tools.report.html.page import Figure, Page, render_page
from shoal.util.regular_file import appearing


def save_page(page: Page, path: Path) -> list[Path]:
    """Write the page to `path`, and next to it each figure as PNG, SVG and CSV; return all paths.

    The directory is created if necessary. Raises OSError if it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path]
    for figure in _figures(page):
        for ending, content in (
            ("png", figure.drawing.png),
            ("svg", figure.drawing.svg.encode()),
            ("csv", to_csv(figure.table.lines).encode()),
        ):
            written.append(path.with_name(f"{figure.name}.{ending}"))
            _replace(written[-1], content)
    _replace(path, render_page(page).encode())
    return written


def _figures(page: Page) -> Iterator[Figure]:
    for section in page.sections:
        yield from (block for block in section.blocks if isinstance(block, Figure))


def _replace(path: Path, content: bytes) -> None:
    with appearing(path) as aside:
        aside.write_bytes(content)
