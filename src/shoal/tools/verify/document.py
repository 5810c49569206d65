"""The report of an audit as a document."""

from __future__ import annotations

from shoal.tools.verify.audit import AuditReport
from shoal.tools.verify.properties import cause_of
from shoal.util.document import Document, KeyNumbers, Section, Table, Text, to_plain


def audit_document(report: AuditReport) -> Document:
    """Return the answers, then the causes and the runs."""
    held = sum(finding.verdict == "held" for finding in report.findings)
    unknown = len(report.findings) - held - report.refuted
    answers = Table(
        caption="Properties",
        head=("property", "answer", "evidence"),
        rows=[(each.name, each.answer, each.evidence) for each in report.findings],
    )
    causes = [
        Text(text=f"{each.line}: {each.name}", advice=f"change: {each.change}", whole=True)
        for each in cause_of(report.findings)
    ]
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    runs = KeyNumbers(pairs=[("runs", "; ".join(report.runs)), ("versions", versions)])
    notes = [Text(text=f"note: {note}") for note in report.notes]
    return Document(
        title=f"shoal verify {report.command}",
        # It claims no more than the runs showed.
        verdict=f"{report.command}: {held} properties held, {report.refuted} refuted, {unknown} not "
        "decidable",
        sections=[
            Section(heading="Answers", blocks=[answers]),
            Section(heading="Causes", blocks=causes),
            Section(heading="Runs", blocks=[*notes, runs]),
        ],
        values={
            **to_plain(report),
            "findings": [{**to_plain(each), "answer": each.answer} for each in report.findings],
        },
    )
