"""The report of a storm, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault and its consequence.

    `seconds` is the time since the start of the storm; None if the run never came to its place.
    `noticed_by` is empty if the run continued without a message about it; otherwise it was noticed
    `noticed_after` seconds later, with `message`.
    """

    number: int
    kind: str
    place: str
    seconds: float | None
    noticed_by: str = ""
    noticed_after: float | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class StormReport:
    """The result of a storm.

    `steps` is the number of steps of the undisturbed run, `taken` that of the storm, `repeated` those
    that were taken again. `end` and `undisturbed` are the SHA-256 of the final checkpoints. `problem`
    is empty if the storm ended like the undisturbed run.
    """

    command: str
    seed: int
    processes: int
    faults: tuple[InjectedFault, ...]
    attempts: int
    steps: int
    taken: int
    seconds: float
    undisturbed_seconds: float
    end: str
    undisturbed: str
    problem: str
    output: str = ""
    versions: dict[str, str]

    @property
    def repeated(self) -> int:
        """The number of steps that were taken again."""
        return max(0, self.taken - self.steps)

    @property
    def goodput(self) -> float:
        """The fraction of steps that were not lost."""
        return self.steps / self.taken if self.taken else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {**asdict(self), "repeated": self.repeated, "goodput": self.goodput}

    @staticmethod
    def from_json(plain: dict[str, Any]) -> StormReport:
        """Return the report that `as_json` made plain."""
        known = {name: value for name, value in plain.items() if name not in ("repeated", "goodput")}
        faults = tuple(InjectedFault(**each) for each in plain["faults"])
        return StormReport(**{**known, "faults": faults})
