"""A comparison of a prediction with a run as a document."""

from __future__ import annotations

from shoal.tools.plan.check import RunCheck
from shoal.tools.plan.show.parts import time_bars
from shoal.util.document import Document, Section, Table
from shoal.util.units import counted, duration


def check_document(found: RunCheck) -> Document:
    """Return the predicted and the measured time of each part, and of the step."""
    head = ("part", "predicted", "measured")
    rows = [
        (
            each.name,
            "not predicted" if each.predicted is None else duration(each.predicted),
            duration(each.measured),
        )
        for each in found.parts
    ]
    table = Table(
        caption=f"{counted(found.steps, 'step')}, {found.plan.layout}",
        head=head,
        rows=[*rows, ("step", duration(found.step.total), duration(found.measured))],
        right=head[1:],
    )
    predicted = {each.name: each.predicted or 0.0 for each in found.parts}
    measured = {each.name: each.measured for each in found.parts}
    bars = time_bars("", "A step by part, predicted and measured", head[1:], [predicted, measured])
    return Document(
        title=f"Prediction and run: {found.plan.layout}",
        verdict=found.verdict,
        about=f"shoal plan --check, {found.steps:,} steps",
        sections=[Section(heading="Parts", blocks=[*bars, table])],
        values={
            "verdict": found.verdict,
            "layout": str(found.plan.layout),
            "micro_batch": found.plan.micro_batch,
            "steps": found.steps,
            "predicted_seconds": found.step.total,
            "measured_seconds": found.measured,
            "parts": found.parts,
        },
    )
