"""The options of a storm and its report, without an import of torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import shorten

from shoal.util.document import Document, DocumentBlock, KeyNumbers, Section, Table, Text
from shoal.util.units import counted, duration, percent


@dataclass(frozen=True, kw_only=True)
class StormRequest:
    """The script, its ranks, and the faults: a number of them of these kinds, drawn from a seed.

    `limit` is the longest time of one attempt in seconds. With `shrinks`, a storm that fails is
    repeated without single faults until each of them is needed.
    """

    script: str
    args: tuple[str, ...]
    processes: int
    kinds: tuple[str, ...]
    count: int
    seed: int
    limit: float
    shrinks: bool

    @property
    def command(self) -> str:
        """The script and its arguments."""
        return shlex.join((self.script, *self.args))


HEAD = ("fault", "place", "after", "noticed by", "within")
_LONGEST = 160


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
    versions: Mapping[str, str]

    @property
    def repeated(self) -> int:
        """The number of steps that were taken again."""
        return max(0, self.taken - self.steps)

    @property
    def goodput(self) -> float:
        """The fraction of steps that were not lost."""
        return self.steps / self.taken if self.taken else 0.0


def storm_document(report: StormReport) -> Document:
    """Return the verdict, the faults and the figures."""
    messages = [
        (fault.kind, shorten(fault.message, _LONGEST, placeholder=" …"))
        for fault in report.faults
        if fault.message
    ]
    digests = f"{report.end[:16] or 'none'}, undisturbed {report.undisturbed[:16]}"
    figures = [
        ("attempts", str(report.attempts)),
        ("steps", f"{report.steps} needed, {report.taken} taken, {report.repeated} repeated"),
        ("goodput", percent(report.goodput)),
        ("time", f"{duration(report.seconds)}, undisturbed {duration(report.undisturbed_seconds)}"),
        ("SHA-256 of the end", digests),
        ("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items())),
    ]
    blocks: list[DocumentBlock] = [
        Table(caption="", head=HEAD, rows=[_row(fault) for fault in report.faults]),
        *([KeyNumbers(pairs=messages)] if messages else []),
        KeyNumbers(pairs=figures),
    ]
    if report.problem:
        replay = f"replay: {replay_command(report)}"
        blocks += [Text(text=report.output.strip()), Text(text=replay, whole=True)]
    return Document(
        title=f"shoal chaos {report.command}",
        verdict=describe_storm(report),
        sections=[Section(blocks=blocks)],
        values={**asdict(report), "repeated": report.repeated, "goodput": report.goodput},
    )


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
