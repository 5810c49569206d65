"""Options that `shoal submit` and `shoal bench scaling --submit` share."""

from __future__ import annotations

from typing import Annotated

import typer

Site = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of `shoal sites ls`; else found by this host.")
]
Partition = Annotated[
    str | None, typer.Option("-p", "--partition", metavar="NAME", help="One of the site's.")
]
Qos = Annotated[
    str | None, typer.Option(metavar="NAME", help="Quality of service; else the first that fits.")
]
Account = Annotated[
    str | None, typer.Option("-A", "--account", metavar="NAME", help="Whose hours these are.")
]
Cpus = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Cores of each process; else the site's.")
]
Directive = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTION", help="One more for the scheduler, as in --directive=--exclude=n1."),
]
Force = Annotated[bool, typer.Option("--force", help="Submit although something speaks against.")]
