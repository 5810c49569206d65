"""The report of a storm on a terminal."""

from __future__ import annotations

from textwrap import shorten

from rich.console import Console

from shoal.tools.chaos.report import InjectedFault, StormReport
from shoal.util.tables import print_line, print_pairs, print_path, print_rows
from shoal.util.units import counted, duration, percent

HEAD = ("fault", "place", "after", "noticed by", "within")
_LONGEST = 160


def print_storm(console: Console, report: StormReport) -> None:
    """Print the verdict, the faults and the figures."""
    print_line(console, describe_storm(report))
    print_rows(console, "", HEAD, [_row(fault) for fault in report.faults])
    messages = [
        (fault.kind, shorten(fault.message, _LONGEST, placeholder=" …"))
        for fault in report.faults
        if fault.message
    ]
    if messages:
        print_pairs(console, "", messages)
    digests = f"{report.end[:16] or 'none'}, undisturbed {report.undisturbed[:16]}"
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    print_pairs(
        console,
        "",
        [
            ("attempts", str(report.attempts)),
            ("steps", f"{report.steps} needed, {report.taken} taken, {report.repeated} repeated"),
            ("goodput", percent(report.goodput)),
            ("time", f"{duration(report.seconds)}, undisturbed {duration(report.undisturbed_seconds)}"),
            ("SHA-256 of the end", digests),
            ("versions", versions),
        ],
    )
    if report.problem:
        print_line(console, "", report.output.strip())
        print_path(console, f"replay: {replay_command(report)}")


def describe_storm(report: StormReport) -> str:
    """Return the result in one sentence."""
    happened = sum(fault.seconds is not None for fault in report.faults)
    said = f"{report.command}: {counted(happened, 'fault')} on {counted(report.processes, 'rank')}"
    if report.problem:
        return f"{said}: {report.problem}"
    return f"{said}, and the end is bit-identical to the undisturbed run"


def replay_command(report: StormReport) -> str:
    """Return the command of the same storm."""
    kinds = ",".join(sorted({fault.kind for fault in report.faults}))
    options = f"-n {report.processes} --seed {report.seed} --count {len(report.faults)}"
    return f"shoal chaos {options} --faults {kinds} {report.command}"


def _row(fault: InjectedFault) -> tuple[str, ...]:
    if fault.seconds is None:
        return fault.kind, fault.place, "not reached", "", ""
    within = "" if fault.noticed_after is None else duration(fault.noticed_after)
    by = fault.noticed_by or "no message"
    return fault.kind, fault.place, duration(fault.seconds), by, within
