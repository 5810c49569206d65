"""Answers of `shoal verify`, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.tools.verify.operations import OperationDifference

Verdict = Literal["held", "refuted", "not decidable"]


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """A likely cause: its name, the line of the user's script, and the change to make."""

    name: str
    line: str
    change: str


@dataclass(frozen=True, kw_only=True)
class DifferingStep:
    """The first step in which tensors differ between two runs: its number in each, from 1."""

    first: str
    second: str
    steps: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PropertyFinding:
    """The answer for one property.

    `runs` is the number of runs in which it was observed, `evidence` what was seen or the reason that
    nothing could be decided. `difference` is the step in which to look for the operation that makes the
    difference, `operation` this operation.
    """

    name: str
    verdict: Verdict
    runs: int = 0
    evidence: str = ""
    cause: LikelyCause | None = None
    difference: DifferingStep | None = None
    operation: OperationDifference | None = None

    @property
    def answer(self) -> str:
        """The verdict in words: `held in 2 runs`, `refuted`, `not decidable here`."""
        if self.verdict == "held":
            return f"held in {self.runs} run{'s' if self.runs != 1 else ''}"
        return "not decidable here" if self.verdict == "not decidable" else "refuted"


def held(name: str, runs: int, evidence: str = "") -> PropertyFinding:
    """Return that a property held in a number of runs."""
    return PropertyFinding(name=name, verdict="held", runs=runs, evidence=evidence)


def refuted(
    name: str,
    evidence: str,
    cause: LikelyCause | None = None,
    difference: DifferingStep | None = None,
) -> PropertyFinding:
    """Return that a property does not hold, with what was seen."""
    return PropertyFinding(
        name=name, verdict="refuted", evidence=evidence, cause=cause, difference=difference
    )


def undecided(name: str, reason: str) -> PropertyFinding:
    """Return that a property could not be decided."""
    return PropertyFinding(name=name, verdict="not decidable", evidence=reason)
