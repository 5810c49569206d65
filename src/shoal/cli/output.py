"""Documents as the options of a command ask: on the terminal, as JSON, as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.util.document import Document


def show_document(
    document: Document,
    *,
    as_json: bool = False,
    page: Path | None = None,
    option: str = "--html FILE",
    stderr: bool = False,
) -> None:
    """Print the document, or its values as JSON, and write it to a page, a file, if given.

    With `stderr`, it is not printed on standard output. The path of the page never is.

    Raises LaunchError, with the option of the page, if the page can't be written.
    """
    from shoal.util.document import to_json
    from shoal.util.tables import plain_console, print_document, print_path

    if as_json:
        typer.echo(to_json(document))
    else:
        print_document(plain_console(stderr=stderr), document)
    if page is not None:
        from shoal.tools.report.html import save_page

        print_path(plain_console(stderr=True), str(save_page(document, page, option=option)[0]))
