"""What an examination found: lines that are ok, a warning or a failure, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from shoal.util.differences import spans

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

FORMAT = 1
"""Of the report as JSON; it counts up when a reader would have to know."""

_NAMED = 3


class State(StrEnum):
    """Failure: training breaks, gives other numbers or takes twice as long. Warning: less than that."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


_GRAVEST = (State.FAILURE, State.WARNING, State.OK)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report: what was looked at, what was found, what to type if it is not ok."""

    what: str
    state: State
    found: str
    fix: str = ""


def ok(what: str, found: str) -> Finding:
    """A line on what is in order."""
    return Finding(what=what, state=State.OK, found=found)


def warning(what: str, found: str, fix: str) -> Finding:
    """A line on what may cost time or trouble."""
    return Finding(what=what, state=State.WARNING, found=found, fix=fix)


def failure(what: str, found: str, fix: str) -> Finding:
    """A line on what is broken."""
    return Finding(what=what, state=State.FAILURE, found=found, fix=fix)


@dataclass(frozen=True, kw_only=True)
class Seen(Generic[T]):
    """What a rank has found out, `facts`, with its number and its host."""

    rank: int
    host: str
    facts: T


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All findings, the gravest first, with how many ranks of which hosts were looked at, and when.

    `began` is in seconds since the epoch, `seconds` is how long it took.
    """

    ranks: int
    hosts: tuple[str, ...]
    began: float
    seconds: float
    versions: dict[str, str]
    findings: tuple[Finding, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.findings, key=lambda one: _GRAVEST.index(one.state))
        object.__setattr__(self, "findings", tuple(ordered))

    def count(self, state: State) -> int:
        """How many lines are in this state."""
        return sum(one.state is state for one in self.findings)

    @property
    def failed(self) -> bool:
        """Whether any line is a failure: what `--strict` stops for."""
        return self.count(State.FAILURE) > 0

    def verdict(self) -> str:
        """What it comes to, in a sentence."""
        bad = [
            f"{count} {state}{'s' * (count > 1)}"
            for state in _GRAVEST[:2]
            if (count := self.count(state))
        ]
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        fine = f"{self.count(State.OK)} checks ok, on {ranks} of {hosts}, in {self.seconds:.0f} s"
        return f"{' and '.join(bad)}; {fine}" if bad else fine

    def plain(self) -> dict[str, Any]:
        """All of it as JSON holds it."""
        return {"format": FORMAT, "verdict": self.verdict(), **asdict(self)}


def where(ranks: Sequence[Seen[Any]]) -> str:
    """Ranks and their hosts in short: `rank 3 (node2)`, `ranks 0-7 (node1, node2)`."""
    hosts = list(dict.fromkeys(one.host for one in ranks))
    named = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if hosts[_NAMED:] else "")
    return f"rank{'s' * (len(ranks) > 1)} {spans([one.rank for one in ranks])} ({named})"


def grouped(ranks: Iterable[Seen[T]], key: Callable[[Seen[T]], K]) -> dict[K, list[Seen[T]]]:
    """Ranks that have `key` in common, in the order of their first one."""
    groups: dict[K, list[Seen[T]]] = {}
    for one in ranks:
        groups.setdefault(key(one), []).append(one)
    return groups


def by_host(
    ranks: Sequence[Seen[T]], judge: Callable[[Sequence[Seen[T]]], Iterable[Finding]]
) -> Iterator[Finding]:
    """What `judge` says of the ranks of each host: one line where it says the same of several."""
    groups: dict[Finding, list[Seen[T]]] = {}
    for members in grouped(ranks, lambda one: one.host).values():
        for finding in judge(members):
            groups.setdefault(finding, []).extend(members)
    yield from _told(groups, len(ranks))


def by_rank(
    ranks: Sequence[Seen[T]], judge: Callable[[Seen[T]], Iterable[Finding]]
) -> Iterator[Finding]:
    """What `judge` says of each rank: one line where it says the same of several."""
    groups: dict[Finding, list[Seen[T]]] = {}
    for one in ranks:
        for finding in judge(one):
            groups.setdefault(finding, []).append(one)
    yield from _told(groups, len(ranks))


def _told(groups: dict[Finding, list[Seen[T]]], ranks: int) -> Iterator[Finding]:
    for finding, members in groups.items():
        whose = "" if len(members) == ranks else f"{where(members)}: "
        yield Finding(
            what=finding.what, state=finding.state, found=whose + finding.found, fix=finding.fix
        )
