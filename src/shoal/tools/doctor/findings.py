"""The findings of an examination: lines that are ok, a warning or a failure, and their summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from shoal.util.differences import RankDifference, spans
from shoal.util.document import Document, Section, Table
from shoal.util.grouping import group_by
from shoal.util.units import counted, first_few

T = TypeVar("T")

FORMAT = 1
"""Version of the report as JSON; it increases with incompatible changes."""

_NAMED = 3


class Severity(StrEnum):
    """Failure: training breaks, gives other numbers or takes twice as long. Warning: less than that."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


_GRAVEST = (Severity.FAILURE, Severity.WARNING, Severity.OK)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report: what was checked, the result, and the remedy if it is not ok."""

    what: str
    state: Severity
    found: str
    fix: str = ""


def ok(what: str, found: str) -> CheckResult:
    """Return a line about something in order."""
    return CheckResult(what=what, state=Severity.OK, found=found)


def warning(what: str, found: str, fix: str) -> CheckResult:
    """Return a line about something that may cost time or trouble."""
    return CheckResult(what=what, state=Severity.WARNING, found=found, fix=fix)


def failure(what: str, found: str, fix: str) -> CheckResult:
    """Return a line about something broken."""
    return CheckResult(what=what, state=Severity.FAILURE, found=found, fix=fix)


@dataclass(frozen=True, kw_only=True)
class RankFacts(Generic[T]):
    """The measurements of a rank, `facts`, with its number and its host."""

    rank: int
    host: str
    facts: T


Check: TypeAlias = Callable[[Sequence[RankFacts[T]]], Iterator[CheckResult]]
"""A function that judges the measurements of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings, the gravest first, with the ranks and hosts that were examined, and the time.

    `began` is in seconds since the epoch, `seconds` is the duration.
    """

    ranks: int
    hosts: tuple[str, ...]
    began: float
    seconds: float
    versions: dict[str, str]
    findings: tuple[CheckResult, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.findings, key=lambda one: _GRAVEST.index(one.state))
        object.__setattr__(self, "findings", tuple(ordered))

    def count(self, state: Severity) -> int:
        """Return the number of lines in this state."""
        return sum(one.state is state for one in self.findings)

    @property
    def failed(self) -> bool:
        """Whether any line is a failure, for which `--strict` stops."""
        return self.count(Severity.FAILURE) > 0

    def verdict(self) -> str:
        """Return the summary in a sentence."""
        bad = [
            f"{count} {state}{'s' * (count > 1)}"
            for state in _GRAVEST[:2]
            if (count := self.count(state))
        ]
        ranks, hosts = counted(self.ranks, "rank"), counted(len(self.hosts), "host")
        fine = f"{self.count(Severity.OK)} checks ok, on {ranks} of {hosts}, in {self.seconds:.0f} s"
        return f"{' and '.join(bad)}; {fine}" if bad else fine


def examination_document(found: Examination) -> Document:
    """Return the verdict, then a line for each check, the gravest first."""
    rows: list[tuple[str, str, str]] = []
    for one in found.findings:
        mark = one.state if one.state is Severity.OK else one.state.upper()
        rows.append((mark, one.what, one.found))
        rows += [("", "", f"→ {one.fix}")] if one.fix else []
    verdict = found.verdict()
    table = Table(
        caption=f"shoal doctor: {verdict}", head=("", "check", "result and remedy"), rows=rows
    )
    return Document(
        title="shoal doctor",
        sections=[Section(blocks=[table])],
        values={"format": FORMAT, "verdict": verdict, **asdict(found)},
    )


def describe_ranks(ranks: Sequence[RankFacts[Any]]) -> str:
    """Return a short string for ranks and hosts: `rank 3 (node2)`, `ranks 0-7 (node1, node2)`."""
    hosts = list(dict.fromkeys(one.host for one in ranks))
    numbers = f"rank{'s' * (len(ranks) > 1)} {spans([one.rank for one in ranks])}"
    return f"{numbers} ({first_few(hosts, _NAMED)})"


def describe_difference(one: RankDifference, ranks: Sequence[RankFacts[Any]]) -> str:
    """Return the usual value, the number of ranks that have it, and the values of the others."""
    others = (
        f"{value} on {describe_ranks([ranks[index] for index in indices])}"
        for value, indices in one.others.items()
    )
    return f"{one.usual} on {one.times} of {len(ranks)} ranks, {', '.join(others)}"


def same_on_all(ranks: Sequence[object]) -> str:
    """Return the end of a line about a value that all ranks have; empty for one rank."""
    return f", the same on all {len(ranks)} ranks" if len(ranks) > 1 else ""


def by_host(check: Callable[[Sequence[RankFacts[T]]], Iterable[CheckResult]]) -> Check[T]:
    """Make a check of all ranks from one of the ranks of a host.

    It yields one line if the check finds the same on several hosts.
    """

    def check_ranks(ranks: Sequence[RankFacts[T]]) -> Iterator[CheckResult]:
        hosts = group_by(ranks, lambda one: one.host).values()
        return _merge(((members, check(members)) for members in hosts), len(ranks))

    return check_ranks


def by_rank(check: Callable[[RankFacts[T]], Iterable[CheckResult]]) -> Check[T]:
    """Make a check of all ranks from one of a rank, as `by_host` does."""
    return lambda ranks: _merge((([one], check(one)) for one in ranks), len(ranks))


def _merge(
    found: Iterable[tuple[Sequence[RankFacts[T]], Iterable[CheckResult]]], ranks: int
) -> Iterator[CheckResult]:
    groups: dict[CheckResult, list[RankFacts[T]]] = {}
    for members, results in found:
        for result in results:
            groups.setdefault(result, []).extend(members)
    for result, together in groups.items():
        whose = "" if len(together) == ranks else f"{describe_ranks(together)}: "
        yield replace(result, found=whose + result.found)
