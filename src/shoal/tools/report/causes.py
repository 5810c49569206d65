"""The elements of a verdict: judged attempts, findings, and stragglers with their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.tools.report.breakdown import Profile
from shoal.tools.report.history import Attempt
from shoal.tools.report.stalls import Stalls
from shoal.tools.report.stragglers import Straggler

UNEVEN = "uneven"
"""The loss from ranks that wait for each other in turn."""
STALLS = "stalls"
"""The loss from stalls of computing on all ranks together."""

Culprit: TypeAlias = tuple[int, str | None, str]
"""A rank, its host, and the part in which it is slower than the others."""
Costs: TypeAlias = Mapping[Culprit, float]
"""Fraction of all time that each culprit costs."""


@dataclass(frozen=True)
class Finding:
    """A result with advice or the next command, and the fraction of all time that it costs."""

    text: str
    advice: str
    cost: float = 0.0


@dataclass(frozen=True)
class AttemptProfile:
    """One attempt with the profile of its steady steps and of the first ones, which warm up."""

    attempt: Attempt
    profile: Profile
    stragglers: list[Straggler]
    stalls: list[Stalls]
    warm_up: int
    warm_up_seconds: float


def culprit_of(each: Straggler) -> Culprit:
    """Return the key that identifies the same straggler in several attempts."""
    return each.rank, each.host, each.part


def straggler_cost(part: str, named: Sequence[Straggler], costs: Costs) -> float:
    """Return the fraction of all time that stragglers cost in one part."""
    return sum(costs.get(key, 0.0) for key in {culprit_of(each) for each in named if each.part == part})


def rank_names(numbers: Sequence[int]) -> str:
    """Return the words for some ranks in a sentence."""
    return f"rank{'s' if len(numbers) > 1 else ''} {join_names(list(map(str, numbers)))}"


def join_names(names: Sequence[str]) -> str:
    """Return the first few names, and the number of the others."""
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
