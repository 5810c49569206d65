"""`shoal doctor`: options in, report out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.launcher.function import launch
from shoal.tools.doctor import display
from shoal.tools.doctor.findings import Examination
from shoal.tools.doctor.runner import DoctorRequest, examine
from shoal.tools.doctor.support_bundle import collect_bundle
from shoal.util.arguments import check_integer
from shoal.util.errors import LaunchError, ShoalError
from shoal.util.tables import plain_console


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The checks to run, and the form of the report.

    `columns` is the width of the report, for processes whose output another process prints.
    """

    request: DoctorRequest
    strict: bool = False
    as_json: bool = False
    bundle: Path | None = None
    anonymous: bool = False
    columns: int | None = None


def diagnose(order: DoctorOptions, describe: Callable[[], str]) -> int:
    """Run the checks on all ranks of this launch; rank 0 reports. Return the exit code.

    `describe` returns the output of `shoal info`, for a bundle. A rank whose world hangs exits at once.
    """
    try:
        found, hangs = examine(order.request)
    except ShoalError as error:
        display.print_progress(*str(error).strip().splitlines())
        return int(order.strict)
    code = 0 if found is None else _report(order, found, describe)
    if hangs:
        # A normal exit would wait for threads that hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def diagnose_here(order: DoctorOptions, processes: int, describe: Callable[[], str]) -> int:
    """Start processes on this node and run the checks on them. Return the exit code."""
    check_integer(LaunchError, "shoal doctor", "-n", processes, 1, usual=2)
    codes = launch(diagnose, order, describe, processes=processes)
    return max(code or 0 for code in codes)  # a rank that exited at once has returned nothing


def _report(order: DoctorOptions, found: Examination, describe: Callable[[], str]) -> int:
    console = plain_console()
    if order.columns is not None:
        console.width = order.columns
    if order.as_json:
        sys.stdout.write(json.dumps(found.plain(), ensure_ascii=False) + "\n")
    else:
        display.print_examination(console, found)
    if order.bundle is not None:
        made = collect_bundle(
            found, described=describe(), run=order.request.run, anonymous=order.anonymous
        ).write(order.bundle)
        display.print_progress(
            f"in {order.bundle}, to attach to a request; look through it first:", *made
        )
    return int(order.strict and found.failed)
