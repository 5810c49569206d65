"""Facts of several ranks for the checks of `shoal doctor`, and the results that are not ok."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.doctor.findings import CheckResult, RankFacts, Severity


def seen(facts: Sequence[Any], hosts: str = "") -> list[RankFacts[Any]]:
    """Ranks with these facts, each on a host of its own unless `hosts` has a letter for each."""
    return [
        RankFacts(rank=rank, host=hosts[rank] if hosts else f"node{rank}", facts=each)
        for rank, each in enumerate(facts)
    ]


def grave(found: Sequence[CheckResult]) -> list[tuple[str, Severity, str]]:
    return [(one.what, one.state, one.found) for one in found if one.state is not Severity.OK]
