"""`shoal doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import AsJson
from shoal.cli.output import show_document
from shoal.util.arguments import check_integer
from shoal.util.errors import LaunchError, ShoalError

if TYPE_CHECKING:
    from shoal.tools.doctor.findings import Examination
    from shoal.tools.doctor.runner import DoctorRequest


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
    from shoal.launcher.function import launch
    from shoal.tools.doctor.runner import DoctorRequest

    request = DoctorRequest(run=run, data=data, source=source, limit=limit, wait=wait, quick=quick)
    shown = strict, as_json, bundle, redact_hosts
    if processes is None:
        raise typer.Exit(_diagnose(request, *shown))
    check_integer(LaunchError, "shoal doctor", "-n", processes, 1, usual=2)
    codes = launch(_diagnose, request, *shown, processes=processes)
    raise typer.Exit(max(code or 0 for code in codes))  # a rank that exited at once returned nothing


def _diagnose(
    request: DoctorRequest, strict: bool, as_json: bool, bundle: Path | None, anonymous: bool
) -> int:
    """Run the checks on all ranks of this launch; rank 0 reports. Return the exit code.

    A rank whose world hangs exits at once.
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
