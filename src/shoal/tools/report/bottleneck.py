"""The verdict on a run: one sentence, the fractions of time behind it, and findings with advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
    describe_frequency,
    find_stalls,
    join_names,
    losses,
    rank_names,
    straggler_cost,
)
from shoal.tools.report.experts import collapsed_routers
from shoal.tools.report.history import Attempt, Event, History, integer_in, number_in, text_in
from shoal.tools.report.stragglers import Straggler, find_stragglers
from shoal.util.grouping import group_by
from shoal.util.units import duration, percent


def list_findings(
    history: History,
    shares: Mapping[str, float],
    named: list[Straggler],
    costs: Costs,
    judged: list[AttemptProfile],
) -> list[Finding]:
    """Return all findings, the costliest first; findings without a cost come last.

    A loss below the threshold of a finding is reported nevertheless if it costs more than the costliest
    of the others.
    """
    found = list(_slow_ranks(named, costs))
    small: list[Finding] = []
    for loss, large in losses(history, shares, named, costs, judged):
        (found if large else small).append(loss)
    most = max((each.cost for each in found), default=1.0)
    found += [each for each in small if each.cost > most]
    found.sort(key=lambda each: -each.cost)
    corrupt = _corruptions(history)
    planned = _planned(history)
    routers = collapsed_routers(history)
    return [
        *corrupt,
        *routers,
        *found,
        *planned,
        *unread_findings(history),
        *_left_out(history, judged[-1]),
    ]


def _planned(history: History) -> Iterator[Finding]:
    """Yield the step time of the newest attempt that ended with a plan, and the planned one."""
    said = [event for attempt in history.attempts for _, event in attempt.said("plan")]
    ended = [event for event in said if number_in(event, "measured_seconds") is not None]
    if not ended:
        return
    planned = number_in(ended[-1], "predicted_seconds")
    measured = number_in(ended[-1], "measured_seconds")
    if planned is not None and measured is not None:
        yield Finding(
            f"A step took {duration(measured)}, and {duration(planned)} was planned in "
            f"{text_in(ended[-1], 'path')}: {text_in(ended[-1], 'difference')}.",
            f"shoal plan --model MODEL --machine NAME --check {history.directory}",
        )


def _corruptions(history: History) -> Iterator[Finding]:
    """Yield a finding for each corruption of the state that a guard found, once for all ranks."""
    told = dict.fromkeys(
        (integer_in(event, "step"), _ranks_in(event), _tensor_in(event))
        for attempt in history.attempts
        for _, event in attempt.said("corruption")
    )
    for step, ranks, tensor in told:
        yield Finding(
            f"The state of {rank_names(ranks) if ranks else 'a rank'} was corrupt at step "
            f"{'?' if step is None else format(step, ',')}: {tensor or 'an unknown tensor'}.",
            "test the memory of its host, and look for code that depends on the rank",
        )


def _ranks_in(event: Event) -> tuple[int, ...]:
    ranks = event.get("ranks")
    return tuple(r for r in ranks if type(r) is int) if isinstance(ranks, list) else ()


def _tensor_in(event: Event) -> str:
    tensors = event.get("tensors")
    return str(tensors[0])[:200] if isinstance(tensors, list) and tensors else ""


def unread_findings(history: History) -> Iterator[Finding]:
    """Yield findings for files of ranks that could not be read."""
    if history.unread:
        numbers, why = sorted(history.unread), next(iter(history.unread.values()))
        yield Finding(
            f"The events of {rank_names(numbers)} can't be read: {why}.",
            f"ls -l {history.directory}/events",
        )


def _left_out(history: History, newest: AttemptProfile) -> Iterator[Finding]:
    missing = [rank for rank in newest.attempt.missing if rank not in history.unread]
    if missing:
        yield Finding(
            f"Nothing was recorded by {rank_names(missing)}.",
            "check whether these ranks can reach the run directory",
        )
    left_out = newest.profile.aligned.left_out
    if left_out:
        yield Finding(
            f"{rank_names(left_out)} recorded few steps and are left out.",
            "check whether these ranks could write (df -h)",
        )


def _slow_ranks(named: list[Straggler], costs: Costs) -> Iterator[Finding]:
    """Yield a finding for each slow rank and part; parts of computing are combined."""
    by_rank = group_by(
        _together(named),
        lambda each: (each.rank, each.host, "computing" if each.part in COMPUTING else each.part),
    )
    for own in by_rank.values():
        told = "; ".join([_about(own[0], head=True), *(_about(each) for each in own[1:])])
        cost = sum(costs.get(culprit_of(each), 0.0) for each in own)
        yield Finding(f"{told}.", _remedy(own[0]), cost)


def _together(named: list[Straggler]) -> list[Straggler]:
    """Return one straggler per rank and part, even if it was slower in several attempts."""
    found: dict[Culprit, Straggler] = {}
    for each in named:
        before = found.setdefault(culprit_of(each), each)
        until = each.until if each.attempt > before.attempt else before.until
        first = min(before, each, key=lambda one: one.attempt)
        found[culprit_of(each)] = replace(before, since=first.since, until=until)
    return list(found.values())


def _about(each: Straggler, *, head: bool = False) -> str:
    span = f"from step {each.since:,}" + (f" to {each.until:,}" if each.until is not None else " on")
    label = LABELS[each.part]
    against = f"{duration(each.usual + each.excess)} where the others take {duration(each.usual)}"
    what = "a save" if each.part == "checkpoint" else f"{label} of a step" if head else label
    who = f"{each.place[0].upper()}{each.place[1:]}: " if head else ""
    return f"{who}{what} takes {against}, {span}"


def _remedy(each: Straggler) -> str:
    where = f" on {each.host}" if each.host is not None else " on its host"
    if each.part == "wait":
        return f"check the storage and the cores{where}: shoal doctor"
    if each.part == "checkpoint":
        return (
            f"check the storage{where}: shoal doctor; or save less often: "
            "run.tick(every=shoal.YoungDaly(mtbf=…))"
        )
    if each.part in COMPUTING:
        return f"check for a slow or shared device, or cores used by others,{where}: shoal doctor"
    return f"check what the script does only on rank {each.rank}"


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
