"""`shoal verify`."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, ScriptArgs
from shoal.cli.output import show_document
from shoal.cli.submit import script_arguments


def verify(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    args: ScriptArgs = None,
    ranks: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of ranks to compare, such as 1,2,3.")
    ] = "1,2",
    kills: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of runs that are killed and restarted.")
    ] = 1,
    restart_args: Annotated[
        str,
        typer.Option(metavar="ARGS", help="Arguments added when a killed run is started again."),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Optimizer steps after which a run is ended.")
    ] = 40,
    limit: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of one run.")
    ] = 600.0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check if restarts or ranks change the results.

    The script need not use Shoal. Shoal runs it unchanged, in copies of the current directory, and
    observes it. The exit code is 1 if a property is refuted.
    """
    from shoal.tools.bench.options import parse_numbers
    from shoal.tools.verify.audit import audit_script
    from shoal.tools.verify.document import audit_document
    from shoal.tools.verify.variants import VerifyRequest, check_request
    from shoal.util.tables import plain_console, print_path

    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as scratch:
        request = VerifyRequest(
            script=os.path.relpath(Path(script)),
            args=tuple(script_arguments(args)),
            restart_args=tuple(shlex.split(restart_args)),
            ranks=parse_numbers("--ranks", ranks, least=0),
            kills=kills,
            steps=steps,
            limit=limit,
            scratch=Path(scratch).resolve(),
        )
        check_request(request)
        stderr = plain_console(stderr=True)
        found = audit_script(request, lambda name: print_path(stderr, f"running: {name}"))
    show_document(audit_document(found), as_json=as_json, page=html)
    raise typer.Exit(int(found.refuted > 0))
