"""A document and its figures as files."""

from __future__ import annotations

from pathlib import Path

from shoal.tools.report.html.csv import to_csv
from shoal.tools.report.html.page import render_page
from shoal.tools.report.html.plots import draw
from shoal.util.document import Document
from shoal.util.errors import LaunchError
from shoal.util.regular_file import appearing


def save_page(document: Document, path: Path, *, option: str) -> list[Path]:
    """Write a document as HTML to `path`, and next to it each figure as PNG, SVG and CSV.

    The directory is created if necessary. Returns all paths. Raises LaunchError, with the command-line
    option that sets the path, if it can't be written.
    """
    written = [path]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # before drawing the figures, which is slow
        plots = {figure.name: draw(figure.drawing) for figure in document.figures()}
        for figure in document.figures():
            plot = plots[figure.name]
            table = to_csv(figure.drawing.table().lines)
            files = {"png": plot.png, "svg": plot.svg.encode(), "csv": table.encode()}
            for ending, content in files.items():
                written.append(path.with_name(f"{figure.name}.{ending}"))
                _replace(written[-1], content)
        _replace(path, render_page(document, plots).encode())
    except OSError as error:
        raise LaunchError(
            given=f"a page in {path}",
            found=str(error),
            fix=f"write where you have permission: {option}",
        ) from None
    return written


def _replace(path: Path, content: bytes) -> None:
    with appearing(path) as aside:
        aside.write_bytes(content)
