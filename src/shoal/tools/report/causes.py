"""The elements of a verdict: judged attempts, stragglers with their costs, stalls, losses with advice.

A single slow rank shows in comparison with the others. A stall of all ranks in the same step, such as
garbage collection every 50th step, shows only in comparison with other steps: the mean of a part over
steps is above its median.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shoal.tools.report.attempts import QUIET, list_saves
from shoal.tools.report.breakdown import COMPUTING, LABELS, AlignedSteps, Profile, split_steps
from shoal.tools.report.history import PARTS, Array, Attempt, History
from shoal.tools.report.stragglers import NOTABLE, Loading, Straggler, loader_speed_of
from shoal.util.grouping import group_by
from shoal.util.units import bandwidth, counted, duration, percent

RARELY = 1 / 8
"""The largest fraction of the steps that may be stalls; more of them are normal steps."""
LONG = 0.5
"""A stall takes longer than the median by at least this fraction of a step,"""
UNLIKELY = 6.0
"""and by this many standard deviations of the other steps."""
REGULAR = 0.75
"""The fraction of the distances between stalls that must be equal for them to have a period."""
STILL_EQUAL = 0.1
"""The tolerance for these distances, at least one step."""
TOGETHER = (COMPUTING, *((part,) for part in ("communication", "wait", "transfer", "other")))
"""Parts in which stalls are searched for; those of one tuple together, as a stall may hit any."""


@dataclass(frozen=True)
class Stalls:
    """Steps of an attempt in which every rank took much longer over some part than it usually does.

    `part` is that part, or the part of computing with the largest excess. There are `count` such steps;
    `newest` is the last of them; `period` is their distance in steps if they are regular. Each took
    `excess` seconds more than the `usual` seconds. `cost` is the increase of the mean of all steps, in
    seconds per step.
    """

    part: str
    count: int
    newest: int
    period: int | None
    excess: float
    usual: float
    cost: float


def find_stalls(profile: Profile) -> list[Stalls]:
    """Return the stalls of all ranks in the steps of a profile."""
    aligned, first, last = profile.aligned, profile.begin, len(profile.aligned.steps)
    shared = _shared(aligned, first, last)
    work = aligned.column("counted", first, last)[0]
    known = np.isfinite(work) & (work > 0)
    share = np.ones(last - first)
    if known.any():  # a longer batch takes longer, which is not a stall
        share[known] = np.maximum(1.0, work[known] / np.median(work[known]))
    found = []
    for parts in TOGETHER:
        own = {part: shared[part] for part in parts}
        total = np.sum(list(own.values()), axis=0)
        usual = float(np.median(total))
        above = total - usual * (share if parts == COMPUTING else 1.0)
        scatter = 1.4826 * float(np.median(np.abs(total - usual)))
        places = np.flatnonzero(above > max(LONG * profile.usual_seconds, UNLIKELY * scatter))
        if not 0 < len(places) <= RARELY * len(total):
            continue
        part = max(own, key=lambda name: float((own[name][places] - np.median(own[name])).sum()))
        excess = total[places] - usual
        steps = aligned.steps[first:last][places]
        found.append(
            Stalls(
                part=part,
                count=len(places),
                newest=int(steps[-1]),
                period=_period(steps),
                excess=float(excess.mean()),
                usual=float(np.median(own[part])),
                cost=float(excess.sum()) / len(total),
            )
        )
    return found


def _period(steps: Array) -> int | None:
    """Return the distance between these steps, if mostly the same."""
    gaps = np.diff(steps)
    if len(gaps) < 2:
        return None
    middle = float(np.median(gaps))
    equal = np.abs(gaps - middle) <= max(1.0, STILL_EQUAL * middle)
    return round(middle) if equal.mean() >= REGULAR else None


def _shared(aligned: AlignedSteps, first: int, last: int) -> dict[str, Array]:
    """Return by part the minimum over ranks, step by step."""
    pieces = split_steps(first, last, len(aligned.ranks))
    least = [aligned.cube(begin, end)[0].min(axis=1) for begin, end in pieces]
    found = np.concatenate(least, axis=1).astype(np.float64)
    return dict(zip((*PARTS, "other"), found, strict=True))


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


MUCH = 0.1
"""Fraction of the time from which a loss is reported,"""
LEAST = {"checkpoint": NOTABLE, STALLS: NOTABLE}
"""and the fraction for losses that are easily avoided."""
SAVING = 0.01
"""Fraction of the time that saves may take."""

_SHARED = {
    UNEVEN: (
        "Ranks wait for each other in turn, {share} of the time: no rank is slower for long, but in "
        "each step another one is.",
        "if the samples differ in length, use batches of equal numbers of tokens: shoal.Loader(…, "
        "batch_size=shoal.TokenBudget(lengths, 4096)); otherwise check whether other jobs use these "
        "machines: shoal doctor",
    ),
    "transfer": (
        "Ranks wait for copies to the device {share} of the time{where}.",
        "shoal.Loader(…, pin_memory=True); load smaller dtypes and convert to float on the device",
    ),
    "evaluation": (
        "Evaluation takes {share} of the time{where}.",
        "evaluate less often, or on fewer batches: shoal.evaluate(…, batches=N)",
    ),
    "other": (
        "The script's own code (logging, metrics, the forward pass of a custom training loop) takes "
        "{share} of the time{where}.",
        "profile it: shoal.Run(…, profile=(100, 105)), then shoal report RUN --trace 100:105",
    ),
}


def losses(
    history: History,
    shares: Mapping[str, float],
    named: Sequence[Straggler],
    costs: Costs,
    judged: Sequence[AttemptProfile],
) -> Iterator[tuple[Finding, bool]]:
    """Yield the losses in parts for which no single rank is to blame.

    With each comes whether it is large enough to be reported in any case.
    """
    for part, share in shares.items():
        left = share if part in (STALLS, UNEVEN) else share - straggler_cost(part, named, costs)
        if part == "computing" or part in COMPUTING or left < NOTABLE:
            continue
        seconds = sum(each.profile.seconds * each.profile.steps for each in judged)
        if part == "checkpoint" and left * seconds < QUIET:
            continue  # in a short run, any save is a large fraction
        text, advice = _about(part, left, history, judged)
        stalls = next((each for one in judged for each in one.stalls if each.part == part), None)
        if stalls is not None and stalls.cost > 0.5 * left * judged[-1].profile.seconds:
            text += (
                f" Most of it is lost {describe_frequency(stalls)}: {duration(stalls.excess)} there."
            )
        yield Finding(text, advice, left), left >= LEAST.get(part, MUCH)


def describe_frequency(each: Stalls) -> str:
    """Return how often a stall occurs: `every 50 steps`."""
    if each.period is not None:
        return f"every {each.period:,} steps"
    return f"at step {each.newest:,}" if each.count == 1 else f"in {each.count:,} steps"


def _about(
    part: str, share: float, history: History, judged: Sequence[AttemptProfile]
) -> tuple[str, str]:
    """Return a sentence on the loss in a part, and advice."""
    describe = _DESCRIBED.get(part)
    if describe is not None:
        return describe(share, history, judged)
    text, advice = _SHARED[part]
    return text.format(share=percent(share), where=_everywhere(judged[-1].attempt)), advice


def _everywhere(attempt: Attempt) -> str:
    return " on all ranks" if attempt.size > 1 else ""


def _about_stalls(share: float, history: History, judged: Sequence[AttemptProfile]) -> tuple[str, str]:
    one, each = max(
        ((one, each) for one in judged for each in one.stalls if each.part in COMPUTING),
        key=lambda found: found[1].cost * found[0].profile.steps,
    )
    who = "All ranks stall together" if one.attempt.size > 1 else "Training stalls"
    text = (
        f"{who} {describe_frequency(each)}, {percent(share)} of the time: {LABELS[each.part]} takes "
        f"{duration(each.excess)} longer there, {duration(each.usual)} elsewhere."
    )
    return text, (
        "find out what runs in these steps, such as garbage collection (call gc.freeze() after the "
        f"first steps), logging or file access: shoal report {history.directory} "
        f"--trace {each.newest}:{each.newest}"
    )


def _about_data(share: float, _: History, judged: Sequence[AttemptProfile]) -> tuple[str, str]:
    one = judged[-1]
    text = f"Ranks wait for data {percent(share)} of the time{_everywhere(one.attempt)}"
    found = loader_speed_of(one.profile)
    if found is None:
        return f"{text}.", "use more workers, or reduce work per sample: shoal.Loader(…, num_workers=N)"
    batch = duration(found.seconds)
    if not found.workers:
        text += f": each rank makes its batches itself, in {batch} each"
    else:
        text += f": a worker takes {batch} per batch, and a rank has {counted(found.workers, 'worker')}"
    return f"{text}.", _more_workers(found)


def _more_workers(found: Loading) -> str:
    """Return the number of workers that would keep up, or other advice if more workers do not help."""
    if found.enough <= found.workers:
        return (
            "the workers are fast enough: check for batches that are slow to transfer between "
            "processes, or late at the start of an epoch; shoal bench data measures it"
        )
    if found.cores is not None and found.enough > found.cores:
        return (
            f"shoal.Loader(…, num_workers={found.enough}) would keep up if workers mostly wait, since "
            f"a rank has {counted(found.cores, 'core')}; otherwise use more cores, or reduce work per "
            "sample, for example by preprocessing the data once; shoal bench data measures it"
        )
    return f"shoal.Loader(…, num_workers={found.enough}) would keep up; shoal bench data measures it"


def _about_links(share: float, _: History, judged: Sequence[AttemptProfile]) -> tuple[str, str]:
    attempt = judged[-1].attempt
    hosts = sorted({host for rank in attempt.ranks if (host := attempt.host(rank)) is not None})
    text = f"All ranks wait for each other's data: {percent(share)} of the time is communication"
    traffic = group_by(attempt.traffic.items(), lambda item: item[0][1])
    seconds = {key: sum(sums.seconds for _, sums in found) for key, found in traffic.items()}
    key = max(seconds, key=lambda key: seconds[key], default=None)
    if key is not None and seconds[key] > 0:
        kind, group, ranks, backend = key
        moved = sum(sums.bytes for _, sums in traffic[key])
        bus = max(sums.bus for _, sums in traffic[key])
        text += (
            f", most of it {kind} by {backend} over {ranks} ranks (group {group}) at "
            f"{bandwidth(moved / seconds[key])} ({bandwidth(bus)} on the bus)"
        )
    if len(hosts) > 1:
        text += f", over the network between {join_names(hosts)}"
    elif hosts:
        text += f", within {hosts[0]}"
    strategy = attempt.starts.get(min(attempt.starts, default=0), {}).get("strategy", "DDP")
    fewer = (
        'shoal.DDP(compression="auto") or shoal.DiLoCo(sync_every=500) send fewer bytes; '
        if str(strategy).startswith("DDP")
        else ""
    )
    return f"{text}.", (
        f"{fewer}larger batches communicate less often; shoal doctor measures each pair of ranks"
    )


def _about_saves(share: float, _: History, judged: Sequence[AttemptProfile]) -> tuple[str, str]:
    attempt = judged[-1].attempt
    saves = [each for each in list_saves(attempt) if each.ranks]
    text = f"Checkpoints block training for {percent(share)} of the time"
    longest = max(saves, key=lambda each: each.seconds, default=None)
    if longest is not None and longest.seconds > 0:
        text += f"; the longest took {duration(longest.seconds)} ({attempt.place(longest.slowest)})"
    steps = [each.step for each in saves]
    fewer = "run.tick(every=shoal.YoungDaly(mtbf=…))"
    if len(steps) > 2:
        interval = float(np.median(np.diff(steps)))
        fewer = f"run.tick(every={_rounded(interval * share / SAVING):,d}) or {fewer}".replace(",", "_")
    return f"{text}.", (f"save less often: {fewer}, or to a faster file system: Run(…, checkpoints=…)")


_DESCRIBED = {
    STALLS: _about_stalls,
    "communication": _about_links,
    "wait": _about_data,
    "checkpoint": _about_saves,
}
"""The functions that describe the loss in a part, where a sentence of _SHARED does not."""


def _rounded(steps: float) -> int:
    """Return a round number of steps that is at least this one: 700, 3000."""
    unit = 10 ** max(0, math.floor(math.log10(max(1.0, steps))))
    return int(math.ceil(steps / unit) * unit)
