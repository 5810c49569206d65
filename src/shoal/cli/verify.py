"""`shoal verify` and `shoal chaos`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import AsJson, ScriptArgs
from shoal.cli.output import show_document
from shoal.cli.submit import script_arguments
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.tools.chaos.report import StormRequest


def chaos(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    args: ScriptArgs = None,
    processes: Annotated[
        int, typer.Option("-n", "--processes", min=1, metavar="N", help="Number of ranks.")
    ] = 2,
    faults: Annotated[
        str, typer.Option(metavar="LIST", help="Kinds of faults, such as kill,disk-full, or all.")
    ] = "kill,kill-in-save,kill-launcher,kill-all,stop",
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Number of faults.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of the kinds and places of the faults.")
    ] = 0,
    limit: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of one attempt.")
    ] = 600.0,
    shrink: Annotated[
        bool, typer.Option(help="Repeat a storm that fails with fewer faults, to find those needed.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Inject faults and compare the final checkpoint.

    The script trains in a shoal.Run. It runs in copies of the current directory, inside Linux
    namespaces. The exit code is 1 if the storm changed the result.
    """
    from shoal.tools.chaos.faults import check_kinds
    from shoal.tools.chaos.report import StormReport, StormRequest, storm_document
    from shoal.util.plain import from_plain

    _check_script(script)
    request = StormRequest(
        script=script,
        args=tuple(script_arguments(args)),
        processes=processes,
        kinds=check_kinds(faults),
        count=count,
        seed=seed,
        limit=limit,
        shrinks=shrink,
    )
    report: StormReport = from_plain(StormReport, _run(request))
    show_document(storm_document(report), as_json=as_json)
    raise typer.Exit(int(bool(report.problem)))


def _run(request: StormRequest) -> dict[str, Any]:
    """Run the storm inside namespaces and return its report. Raises the LaunchError of the storm."""
    from shoal.tools.chaos.containment import TEMPORARY, contain
    from shoal.tools.chaos.first_process import START

    python = ["env", f"TMPDIR={TEMPORARY}", sys.executable]
    command = contain([*python, "-c", START, json.dumps(asdict(request))])
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise LaunchError(
            given=f"shoal chaos {request.command}",
            found=f"the storm ended with exit code {done.returncode}; the reason is printed above",
            fix="if the error is not in your own code, report it with this message",
        ) from None
    if "given" in found:
        raise LaunchError(**found)
    return found


def _check_script(script: str) -> None:
    from shoal.launcher.entry_point import find_script
    from shoal.tools.chaos.containment import SCRATCH

    path = Path(find_script(script, "shoal chaos train.py")).absolute()
    if Path.cwd().is_relative_to(SCRATCH) or path.is_relative_to(SCRATCH):
        raise LaunchError(
            given=f"shoal chaos in {Path.cwd()}",
            found=f"the storm mounts its own disk over {SCRATCH}",
            fix="copy the script to another directory",
        )


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
    from shoal.tools.verify.audit import audit_document, audit_script
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
