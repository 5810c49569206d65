"""`shoal doctor`, `shoal verify` and `shoal chaos`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.options import AsJson, ScriptArgs, show_document
from shoal.cli.submit import script_arguments
from shoal.util.arguments import check_integer
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.python import code_command

if TYPE_CHECKING:
    from shoal.tools.chaos.report import StormRequest
    from shoal.tools.doctor.findings import Examination
    from shoal.tools.doctor.runner import DoctorRequest
    from shoal.tools.verify.variants import VerifyRequest
    from shoal.util.document import Document


def doctor(
    *,
    processes: Annotated[
        int | None, typer.Option("-n", "--processes", metavar="N", help="Start N ranks on this node.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="A run directory: test its file system.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A dataset: compare it between ranks.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Your source code: compare it between ranks."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check fails.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the measurements of compute and links.")
    ] = False,
    as_json: AsJson = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE.zip", help="Write an archive for support."),
    ] = None,
    redact_hosts: Annotated[
        bool,
        typer.Option(
            "--redact-hosts", help="Replace hosts, users and home directories in the archive."
        ),
    ] = False,
    limit: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit of one check.")
    ] = 10.0,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit for other ranks to arrive.")
    ] = 60.0,
) -> None:
    """Check the nodes of a job before training.

    Under srun, mpirun or torchrun, it joins the ranks of the job and compares them.
    """
    from shoal.distributed.env_vars import on_this_node
    from shoal.launcher.function import launch
    from shoal.tools.doctor.runner import DoctorRequest

    request = DoctorRequest(run=run, data=data, source=source, limit=limit, wait=wait, quick=quick)
    shown = strict, as_json, bundle, redact_hosts
    if processes is None:
        raise typer.Exit(_diagnose(request, *shown))
    check_integer(LaunchError, "shoal doctor", "-n", processes, 1, usual=2)
    with on_this_node():
        codes = launch(_diagnose, request, *shown, processes=processes)
    raise typer.Exit(max(code or 0 for code in codes))  # a rank that exited early returned nothing


def _diagnose(
    request: DoctorRequest, strict: bool, as_json: bool, bundle: Path | None, anonymous: bool
) -> int:
    """Run the checks on all ranks of this launch; rank 0 reports. Return the exit code.

    A rank whose world hangs exits immediately.
    """
    from shoal.tools.doctor.findings import examination_document
    from shoal.tools.doctor.runner import examine

    try:
        found, hangs = examine(request)
    except ShoalError as error:
        _progress(*str(error).strip().splitlines())
        return int(strict)
    if found is not None:
        show_document(examination_document(found), as_json=as_json)
        if bundle is not None:
            _write_bundle(found, bundle, request.run, anonymous=anonymous)
    code = int(found is not None and strict and found.failed)
    if hangs:
        # A normal exit would wait for threads that hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _write_bundle(found: Examination, bundle: Path, run: Path | None, *, anonymous: bool) -> None:
    from shoal.tools.doctor.info import info_document
    from shoal.tools.doctor.support_bundle import UNWRAPPED, collect_bundle, write_bundle
    from shoal.util.tables import rendered

    described = rendered(info_document(), UNWRAPPED)
    texts = collect_bundle(found, described=described, run=run, anonymous=anonymous)
    made = write_bundle(texts, bundle)
    _progress(f"in {bundle}, to attach to a request; look through it first:", *made)


def _progress(*lines: str) -> None:
    """Print lines on stderr, apart from the report."""
    from shoal.util.tables import plain_console, print_line

    print_line(plain_console(stderr=True), *lines)


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

    python = code_command(START, json.dumps(asdict(request)))
    command = contain(["env", f"TMPDIR={TEMPORARY}", *python])
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
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    args: ScriptArgs = None,
    ranks: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of ranks to compare, such as 1,2,3.")
    ] = "1,2",
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare the losses with those of this script instead."),
    ] = None,
    against_ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of ranks of the script of --against.")
    ] = 1,
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
    time_limit: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="SECONDS", help="Time limit of all runs together."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check if restarts or ranks change the results.

    The script need not use Shoal. Shoal runs it unchanged, in copies of the current directory, and
    observes it. The exit code is 1 if a property is refuted, or a loss differs from that of --against,
    else 124 at --time-limit, 128 + N after signal N.
    """
    from shoal.tools.bench.options import check_output, parse_numbers
    from shoal.tools.verify.variants import VerifyRequest, check_request

    check_output("--html", html)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as scratch:
        request = VerifyRequest(
            script=os.path.relpath(Path(script)),
            args=tuple(script_arguments(args)),
            restart_args=_split("--restart-args", restart_args),
            ranks=parse_numbers("--ranks", ranks, least=0),
            kills=kills,
            steps=steps,
            limit=limit,
            scratch=Path(scratch).resolve(),
        )
        check_request(request)
        old = None
        if against is None:
            _check_source(ctx, "against_ranks", only="with")
        else:
            for name in ("kills", "restart_args"):
                _check_source(ctx, name, only="without")
            old = os.path.relpath(against)
            check_request(replace(request, script=old))
        document, code = _verified(request, old, against_ranks, time_limit)
    show_document(document, as_json=as_json, page=html)
    raise typer.Exit(code)


def _verified(
    request: VerifyRequest, old: str | None, old_ranks: int, time_limit: float | None
) -> tuple[Document, int]:
    """Return the report of an audit, or of the comparison with an old script, and the exit code."""
    from shoal.launcher.signals import Interrupted, Interrupts
    from shoal.tools.verify import run_servers
    from shoal.tools.verify.against import compare_losses, loss_document
    from shoal.tools.verify.audit import audit_document, audit_script
    from shoal.tools.verify.progress import VerifyProgress
    from shoal.util.tables import plain_console

    try:
        with (
            Interrupts().handled(lambda _: False),
            VerifyProgress(plain_console(stderr=True)) as progress,
            run_servers.RunServers(
                request.scratch,
                processes=max(*request.ranks, old_ranks),
                look=progress.look,
                time_limit=time_limit,
            ) as servers,
        ):
            if old is None:
                audit = audit_script(request, servers, progress)
                return audit_document(audit), 1 if audit.refuted else servers.code
            losses = compare_losses(request, old, size=old_ranks, servers=servers, progress=progress)
            return loss_document(losses), servers.code if losses.same else 1
    except Interrupted as again:
        raise typer.Exit(128 + again.signum) from None


def _split(option: str, text: str) -> tuple[str, ...]:
    """Return the words of a shell command."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(
            given=f"{option} {text}",
            found=str(error),
            fix=f"{option} {shlex.quote('--resume last.pt')}",
        ) from None


def _check_source(ctx: typer.Context, name: str, *, only: str) -> None:
    """Raise LaunchError if an option is given that has a meaning only with or without --against."""
    source = ctx.get_parameter_source(name)
    if source is not None and source.name != "DEFAULT":
        option = f"--{name.replace('_', '-')}"
        raise LaunchError(
            given=f"shoal verify {option} {ctx.params[name]}",
            found=f"{option} has a meaning only {only} --against",
            fix=f"leave {option} out",
        )
