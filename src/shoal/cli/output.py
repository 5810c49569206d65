"""Documents as the options of a command ask: on the terminal, as JSON, as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.util.document import Document


def show_document(
    document: Document, *, as_json: bool = False, html: Path | None = None, stderr: bool = False
) -> None:
    """Write the page to `html`, a file, if given; print the document, or its values as JSON.

    With `stderr`, it is not printed on standard output.

    Raises LaunchError if the page can't be written.
    """
    from shoal.util.document import to_json
    from shoal.util.tables import plain_console, print_document

    if html is not None:
        from shoal.tools.report.html import save_page

        save_page(document, html, option="--html FILE")
    if as_json:
        typer.echo(to_json(document))
    else:
        print_document(plain_console(stderr=stderr), document)
