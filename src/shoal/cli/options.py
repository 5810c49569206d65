"""Options that several commands have, and the form of their output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.util.document import Document

SCRIPT_LAST = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""Words after the script are its own; options may have underscores, as torchrun's do."""

ScriptArgs = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Site = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Cluster profile of `shoal sites ls` (default: SHOAL_SITE, else by host name).",
    ),
]
Partition = Annotated[
    str | None, typer.Option("-p", "--partition", metavar="NAME", help="Partition of the cluster.")
]
Qos = Annotated[
    str | None, typer.Option(metavar="NAME", help="Quality of service (default: the first that fits).")
]
Account = Annotated[
    str | None, typer.Option("-A", "--account", metavar="NAME", help="Account to charge.")
]
Cpus = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="CPU cores per process (default: from the profile)."),
]
Directive = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="Extra option for the scheduler, for example --directive=--exclude=n1."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Submit despite failed checks.")]


def examples(*commands: str) -> str:
    """Return the epilog of a command's help with these command lines, one paragraph each."""
    return "\n\n".join(("Examples:", *(f"  {command}" for command in commands)))


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
