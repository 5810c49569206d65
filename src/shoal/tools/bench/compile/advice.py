"""The measured modes as a document: which is faster, and from how many calls on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.util.document import Document, Section, Table, Text
from shoal.util.grouping import group_by
from shoal.util.units import duration, percent, two_digits

PYTHON = "Python loop"
SAME = 1.05
"""Smaller differences are ignored."""
EQUAL = 1e-4
"""Results that differ by more, relative to the largest value, are not the same."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to compute a subject: seconds of a call (median, quartiles) and of the first one.

    `difference` is the largest difference of its results from those of torch's operations, relative to
    the largest value. If it could not run, `seconds` is None and `reason` has the reason.
    """

    subject: str
    way: str
    seconds: float | None = None
    low: float = 0.0
    high: float = 0.0
    first: float = 0.0
    samples: int = 0
    difference: float | None = None
    reason: str = ""


def modes_document(found: Sequence[Mode], model: str | None, batch: int) -> Document:
    """Return the advice, and a table for each subject; `batch` is the batch size of the model."""
    advice = mode_advice(found)
    tables = []
    for subject, own in group_by(found, lambda mode: mode.subject).items():
        what = f", forward and backward, batches of {batch}" if subject == model else ""
        head = ("", "a call", "spread", "first call", "differs by")
        rows = [_cells(mode) for mode in own]
        tables.append(Table(caption=f"{subject}{what}", head=head, rows=rows, right=head[1:4]))
    return Document(
        title="Execution modes",
        verdict="",
        sections=[
            Section(heading="Advice", blocks=[Text(text=sentence) for sentence in advice]),
            Section(heading="Times", blocks=tables),
        ],
        values={"advice": advice, "modes": found},
    )


def _cells(mode: Mode) -> tuple[str, ...]:
    if mode.seconds is None:
        return mode.way, "", "", "", mode.reason
    differs = ""
    if mode.difference is not None:
        differs = f"{mode.difference:.0e}" if mode.difference else "nothing"
    spread = percent((mode.high - mode.low) / mode.seconds, tenths=True)
    seconds, first = (duration(each, fixed=True) for each in (mode.seconds, mode.first))
    return mode.way, seconds, spread, first, differs


def mode_advice(found: Sequence[Mode]) -> list[str]:
    """Return a sentence for each subject, and one for each mode with other results."""
    said = [_sentence(subject, found) for subject in dict.fromkeys(mode.subject for mode in found)]
    said += [
        f"{mode.way} gives other results for {mode.subject}: they differ by {mode.difference:.0e}."
        for mode in found
        if mode.difference is not None and not mode.difference <= EQUAL
    ]
    return [sentence for sentence in said if sentence]


def _sentence(subject: str, found: Sequence[Mode]) -> str:
    """Return how the other modes compare with torch's operations run one by one."""
    own = {mode.way: mode for mode in found if mode.subject == subject}
    usual = own.get("torch operations") or own.get("eager")
    if usual is None or usual.seconds is None:
        return ""
    parts = [
        _compared(mode.way, mode.seconds, mode.first, usual.seconds)
        for mode in own.values()
        if mode is not usual and mode.seconds is not None
    ]
    took = duration(usual.seconds, fixed=True)
    return f"{subject}: {usual.way} {took} a call; {'; '.join(parts)}." if parts else ""


def _compared(way: str, seconds: float, first: float, usual: float) -> str:
    ratio = usual / seconds
    if 1 / SAME <= ratio <= SAME:
        return f"{way} as fast"
    if ratio < 1:
        return f"{way} takes {two_digits(1 / ratio)} times as long"
    calls = math.ceil(first / (usual - seconds))
    paid = f", which pays off after {calls:,} calls" if way != PYTHON else ""
    return f"{way} is {two_digits(ratio)} times as fast{paid}"


def mode_csv_rows(found: Sequence[Mode]) -> list[dict[str, object]]:
    """Return all modes as rows of a CSV file."""
    names = {"first": "first_call_seconds"}
    return [{names.get(name, name): value for name, value in asdict(mode).items()} for mode in found]
