"""The report of an audit, for a terminal and as a page."""

from __future__ import annotations

from rich.console import Console

from shoal.tools.report.html import Page, Section, Table, Text
from shoal.tools.verify.audit import AuditReport
from shoal.tools.verify.findings import PropertyFinding
from shoal.tools.verify.properties import cause_of
from shoal.util.tables import print_line, print_pairs, print_path, print_rows

HEAD = ("property", "answer", "evidence")


def print_audit(console: Console, report: AuditReport) -> None:
    """Print the answers, then the causes."""
    print_line(console, describe_verdict(report))
    print_rows(console, "", HEAD, [_row(finding) for finding in report.findings])
    for cause in cause_of(report.findings):
        print_path(console, f"{cause.line}: {cause.name}")
        print_line(console, f"  change: {cause.change}")
    print_line(console, *(f"note: {note}" for note in report.notes))
    print_pairs(console, "", [("runs", "; ".join(report.runs)), ("versions", _versions(report))])


def describe_verdict(report: AuditReport) -> str:
    """Return the result in one sentence, which claims no more than the runs showed."""
    held = sum(finding.verdict == "held" for finding in report.findings)
    unknown = len(report.findings) - held - report.refuted
    return (
        f"{report.command}: {held} properties held, {report.refuted} refuted, {unknown} not decidable"
    )


def audit_page(report: AuditReport) -> Page:
    """Return the report as a page."""
    causes = [
        Text(text=f"{cause.line}: {cause.name}", advice=cause.change)
        for cause in cause_of(report.findings)
    ]
    answers = Table(
        caption="Properties", head=HEAD, rows=[_row(finding) for finding in report.findings]
    )
    runs = Table(caption="Runs", head=("run",), rows=[(name,) for name in report.runs])
    sections = [Section(heading="Answers", blocks=[answers])]
    if causes:
        sections.append(Section(heading="Causes", blocks=causes))
    notes = [Text(text=note) for note in report.notes]
    sections.append(Section(heading="Runs", blocks=[runs, *notes]))
    return Page(
        title=f"shoal verify {report.command}",
        verdict=describe_verdict(report),
        sections=sections,
        about=_versions(report),
    )


def _row(finding: PropertyFinding) -> tuple[str, str, str]:
    return finding.name, finding.answer, finding.evidence


def _versions(report: AuditReport) -> str:
    return ", ".join(f"{name} {number}" for name, number in report.versions.items())
