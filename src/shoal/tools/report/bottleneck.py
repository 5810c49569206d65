"""The verdict on a run: one sentence, the fractions of time behind it, and advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.tools.report.advice import describe_frequency
from shoal.tools.report.breakdown import (
    COMPUTING,
    LABELS,
    OWN,
    SHOWN,
    count_warm_up_steps,
    profile,
)
from shoal.tools.report.causes import (
    STALLS,
    UNEVEN,
    AttemptProfile,
    Costs,
    Culprit,
    Finding,
    culprit_of,
    join_names,
    straggler_cost,
)
from shoal.tools.report.findings import list_findings
from shoal.tools.report.history import Attempt, History
from shoal.tools.report.stalls import find_stalls
from shoal.tools.report.stragglers import Straggler, find_stragglers
from shoal.util.grouping import group_by
from shoal.util.units import percent

WORTH = 0.01
"""The smallest fraction that the sentence mentions."""

WORDS = {
    "communication": "exposed communication",
    "wait": "data",
    "transfer": "transfer to the device",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "other": "the script's own time",
    UNEVEN: "ranks waiting for each other",
    STALLS: "stalls",
}


@dataclass(frozen=True)
class BottleneckReport:
    """Where the time of a run was spent.

    `shares` are fractions of the time of all steady steps and add up to 1. "computing" (also
    `efficient`) is the time the steps would take if all ranks computed like a usual one and nothing
    else took time. The others are losses. `stragglers` are those of all attempts, the costliest first.
    """

    sentence: str
    efficient: float | None
    shares: Mapping[str, float]
    stragglers: list[Straggler]
    findings: list[Finding]
    judged: list[AttemptProfile]


def find_bottleneck(history: History, *, last: int | None = None) -> BottleneckReport:
    """Return the verdict on all attempts; with `last`, on the newest steps of the last attempt only."""
    attempts = history.attempts if last is None else history.attempts[-1:]
    judged = [each for each in (_judged(attempt, last) for attempt in attempts) if each is not None]
    if not judged:
        if history.unread:
            text = f"The events can't be read: {next(iter(history.unread.values()))}."
        elif any(attempt.steps for attempt in attempts):
            text = "The ranks have not recorded any step in common."
        elif attempts:
            text = "No step has been recorded yet."
        else:
            text = "Nothing has been recorded yet."
        return BottleneckReport(text, None, {}, [], [], [])
    shares, costs = _shares(judged)
    named = [each for one in judged for each in one.stragglers]
    named.sort(key=lambda each: (-costs.get(culprit_of(each), 0.0), -each.excess))
    efficient = shares["computing"]
    sentence = _sentence(efficient, shares, named, costs, judged)
    found = list_findings(history, shares, named, costs, judged)
    return BottleneckReport(sentence, efficient, shares, named, found, judged)


def _judged(attempt: Attempt, last: int | None) -> AttemptProfile | None:
    found = profile(attempt, last=last)
    if found is None:
        return None
    warm = count_warm_up_steps(found.aligned)
    seconds = float(found.aligned.column("wall", 0, warm).mean(axis=0).sum())
    return AttemptProfile(attempt, found, find_stragglers(found), find_stalls(found), warm, seconds)


def _shares(judged: list[AttemptProfile]) -> tuple[dict[str, float], Costs]:
    """Return the fractions of all time by part, and those that each straggler costs.

    The time of a step is that of its slowest rank: the time of a usual rank, part by part, and the
    slowest rank's excess. The excess counts towards the part if it is data, a save and the like, and
    towards the straggler if it is computing.
    """
    seconds: dict[str, float] = defaultdict(float)
    costs: dict[Culprit, float] = defaultdict(float)
    for one in judged:
        found, steps = one.profile, one.profile.steps
        wall = found.seconds * steps
        shared = dict(zip(SHOWN, found.average(found.usual) * steps, strict=True))
        surplus = dict(zip(SHOWN, found.average(found.surplus).sum(axis=1) * steps, strict=True))
        for each in one.stragglers:
            cost = each.cost * steps
            costs[culprit_of(each)] += cost
            if each.part in COMPUTING:
                seconds[each.part] += cost
                surplus[each.part] -= cost
        for part in OWN:
            if part in COMPUTING:
                seconds["computing"] += shared[part]
                seconds[UNEVEN] += surplus[part]
            else:
                seconds[part] += shared[part] + surplus[part]
        stalled = sum(each.cost for each in one.stalls if each.part in COMPUTING) * steps
        seconds["computing"] -= stalled
        if stalled:
            seconds[STALLS] += stalled
        seconds["communication"] += shared["communication"]
        seconds[UNEVEN] += (
            wall - sum(shared.values()) - float(found.average(found.surplus).sum()) * steps
        )
    kept = {part: max(0.0, each) for part, each in seconds.items()}  # noise may make one negative
    total = sum(kept.values()) or 1.0
    shares = {part: float(each / total) for part, each in kept.items()}
    return {"computing": 0.0, **shares}, {key: cost / total for key, cost in costs.items()}


def _sentence(
    efficient: float,
    shares: Mapping[str, float],
    named: list[Straggler],
    costs: Costs,
    judged: list[AttemptProfile],
) -> str:
    pieces = [
        piece
        for piece in (*_slow(named, costs), *_lost(shares, named, costs, judged))
        if piece.share >= WORTH
    ]
    pieces.sort(key=lambda piece: -piece.share)
    said = {culprit_of(each) for piece in pieces[:4] for each in piece.guilty}
    told = [f"{percent(piece.share)} {piece.text}" for piece in pieces[:4]]
    # These ranks cost little by themselves, because another is slower still.
    also = [each for each in named if culprit_of(each) not in said]
    behind = list(dict.fromkeys(f"{each.place} in {LABELS[each.part]}" for each in also))
    text = f"{percent(efficient)} efficient"
    if told:
        text += ": " + ", ".join(told)
    if behind:
        text += f"; also slower than the others: {join_names(behind)}"
    return text + "."


@dataclass(frozen=True)
class _Piece:
    """A cause in the sentence: the fraction that it costs, and the stragglers that it lists."""

    share: float
    text: str
    guilty: list[Straggler]


def _slow(named: list[Straggler], costs: Costs) -> Iterator[_Piece]:
    """Yield the cost of ranks that compute slowly, grouped by the parts in which they are slow."""
    by_rank = group_by((each for each in named if each.part in COMPUTING), lambda each: each.place)
    by_parts: dict[tuple[str, ...], list[Straggler]] = {}
    for own in by_rank.values():
        parts = {each.part for each in own}
        by_parts.setdefault(tuple(part for part in COMPUTING if part in parts), []).extend(own)
    for slow_in, guilty in by_parts.items():
        share = sum(costs[key] for key in {culprit_of(each) for each in guilty})
        places = join_names(list(dict.fromkeys(each.place for each in guilty)))
        yield _Piece(
            share, f"a slow {join_names([LABELS[part] for part in slow_in])} ({places})", guilty
        )


def _lost(
    shares: Mapping[str, float], named: list[Straggler], costs: Costs, judged: list[AttemptProfile]
) -> Iterator[_Piece]:
    """Yield the other losses, each with the ranks that cause most of it."""
    for part, share in shares.items():
        if part == "computing" or part in COMPUTING:
            continue
        guilty = [each for each in named if each.part == part]
        if straggler_cost(part, named, costs) <= share / 2:
            guilty = []
        about = join_names(list(dict.fromkeys(each.place for each in guilty))) if guilty else ""
        if part == STALLS:
            about = _when(judged)
        yield _Piece(share, WORDS[part] + (f" ({about})" if about else ""), guilty)


def _when(judged: list[AttemptProfile]) -> str:
    """Return where and how often computing stalls, for the costliest stalls."""
    found = [each for one in judged for each in one.stalls if each.part in COMPUTING]
    each = max(found, key=lambda each: each.cost)
    everywhere = "of all ranks, " if judged[-1].attempt.size > 1 else ""
    return f"{everywhere}{LABELS[each.part]}, {describe_frequency(each)}"
