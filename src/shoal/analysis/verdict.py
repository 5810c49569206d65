"""The verdict on a run: one sentence, the shares that it stands on, and what to do about them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from .history import Attempt, History
from .profile import COMPUTING, LABELS, OWN, SHOWN, Aligned, Profile, align, edges, profile_of, warm_up
from .spelling import bandwidth, duration, percent
from .stragglers import NOTABLE, Straggler, stragglers

UNEVEN = "uneven"
WORTH = 0.01
"""The smallest share that is worth a word in the sentence."""
MUCH = 0.1
"""The share of communication from which something should be done."""

WORDS = {
    "communication": "exposed communication",
    "wait": "data",
    "transfer": "transfer to the device",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "other": "the script's own time",
    UNEVEN: "ranks that wait for each other",
    **{part: f"a slow {LABELS[part]}" for part in COMPUTING},
}


_ALIKE = {
    "wait": (
        "Ranks wait for data",
        "more workers, or less work per sample: shoal bench data; shoal.Loader(…, num_workers=N)",
    ),
    "transfer": (
        "Ranks wait for copies to the device",
        "shoal.Loader(…, pin_memory=True); smaller types, made floats on the device",
    ),
    "evaluation": (
        "Evaluation takes",
        "evaluate less often, or on less: shoal.evaluate(…, batches=N)",
    ),
    "other": (
        "What the script does itself (logging, metrics, the forward pass of a loop of one's own) takes",
        "shoal.Run(…, profile=(100, 105)), and shoal report RUN --trace 100:105 shows what it is",
    ),
}
"""What all ranks lose alike, by part, and what to do about it."""


@dataclass(frozen=True)
class Finding:
    """Something worth knowing, and what to do or to type next."""

    text: str
    advice: str


@dataclass(frozen=True)
class Judged:
    """One attempt: what its steady steps were spent on, and the first ones, which warm up."""

    attempt: Attempt
    profile: Profile
    stragglers: list[Straggler]
    warm_up: int
    warm_up_seconds: float


@dataclass(frozen=True)
class Verdict:
    """What a run's time went into.

    `shares` are parts of the time of all steady steps and add up to one: "computing" is what the steps
    would take if all ranks computed like a usual one and nothing else took time (`efficient`); the
    others are what it lost. `stragglers` are those of all attempts, the costliest first.
    """

    sentence: str
    efficient: float | None
    shares: Mapping[str, float]
    stragglers: list[Straggler]
    findings: list[Finding]
    judged: list[Judged]


def judge(history: History, *, last: int | None = None) -> Verdict:
    """The verdict on all attempts together; with `last` on the newest steps of the last one alone."""
    attempts = history.attempts if last is None else history.attempts[-1:]
    judged = [each for each in (_judged(attempt, last) for attempt in attempts) if each is not None]
    if not judged:
        if history.unread:
            text = f"The events can't be read: {next(iter(history.unread.values()))}."
        elif any(attempt.steps for attempt in attempts):
            text = "The ranks have recorded no step in common."
        elif attempts:
            text = "No step has been recorded yet."
        else:
            text = "Nothing has been recorded yet."
        return Verdict(text, None, {}, [], [], [])
    shares, costs = _shares(judged)
    named = [each for one in judged for each in one.stragglers]
    named.sort(key=lambda each: (-costs.get((each.rank, each.host, each.part), 0.0), -each.excess))
    efficient = shares["computing"]
    sentence = _sentence(efficient, shares, named, costs, judged)
    findings = [*_unread(history), *_findings(shares, named, judged, history.unread)]
    return Verdict(sentence, efficient, shares, named, findings, judged)


def _unread(history: History) -> Iterator[Finding]:
    if history.unread:
        ranks, why = sorted(history.unread), next(iter(history.unread.values()))
        yield Finding(
            f"The events of {_ranks(ranks)} can't be read: {why}.", f"ls -l {history.directory}/events"
        )


def _judged(attempt: Attempt, last: int | None) -> Judged | None:
    aligned = align(attempt)
    if aligned is None:
        return None
    warm = warm_up(aligned)
    begin = warm if last is None else max(warm, len(aligned.steps) - last)
    if begin >= len(aligned.steps):
        begin = 0
    found = profile_of(aligned, edges(begin, len(aligned.steps)))
    return Judged(attempt, found, stragglers(attempt, aligned, found), warm, _spent(aligned, warm))


def _spent(aligned: Aligned, count: int) -> float:
    return float(aligned.column("wall", 0, count).mean(axis=0).sum()) if count else 0.0


Costs = dict[tuple[int, str | None, str], float]


def _shares(judged: list[Judged]) -> tuple[dict[str, float], Costs]:
    """The shares of all time, and those of them that stragglers are to blame for, by who and what.

    The time of a step is that of its slowest rank: what a usual rank takes, part by part, and what the
    slowest has above it. The latter counts as the part's own where it is data, a save and the like,
    and as the straggler's where it is computing.
    """
    seconds: dict[str, float] = defaultdict(float)
    costs: Costs = defaultdict(float)
    for one in judged:
        found, steps = one.profile, one.profile.steps
        wall = float(found.average(found.wall).mean()) * steps
        shared = dict(zip(SHOWN, found.average(found.usual) * steps, strict=True))
        surplus = dict(zip(SHOWN, found.average(found.surplus).sum(axis=1) * steps, strict=True))
        for each in one.stragglers:
            cost = each.cost * steps
            costs[each.rank, each.host, each.part] += cost
            if each.part in COMPUTING:
                seconds[each.part] += cost
                surplus[each.part] -= cost
        for part in OWN:
            if part in COMPUTING:
                seconds["computing"] += shared[part]
                seconds[UNEVEN] += surplus[part]
            else:
                seconds[part] += shared[part] + surplus[part]
        seconds["communication"] += shared["communication"]
        seconds[UNEVEN] += (
            wall - sum(shared.values()) - float(found.average(found.surplus).sum()) * steps
        )
    kept = {part: max(0.0, each) for part, each in seconds.items()}  # noise may leave less than none
    total = sum(kept.values()) or 1.0
    shares = {part: float(each / total) for part, each in kept.items()}
    return {"computing": 0.0, **shares}, {key: cost / total for key, cost in costs.items()}


def _sentence(
    efficient: float,
    shares: Mapping[str, float],
    named: list[Straggler],
    costs: Costs,
    judged: list[Judged],
) -> str:
    losses = sorted(
        ((share, part) for part, share in shares.items() if part != "computing" and share >= WORTH),
        reverse=True,
    )
    said: set[tuple[int, str | None, str]] = set()
    pieces = []
    for share, part in losses[:4]:
        guilty = _guilty(part, share, named, costs)
        said |= {(each.rank, each.host, each.part) for each in guilty}
        places = list(dict.fromkeys(each.place for each in guilty))
        whom = f" ({_several(places)})" if places else ""
        pieces.append(f"{percent(share)} {WORDS[part]}{whom}")
    # Ranks that cost little by themselves, because another is slower still.
    also = [each for each in named if (each.rank, each.host, each.part) not in said]
    behind = list(dict.fromkeys(f"{each.place} in {LABELS[each.part]}" for each in also))
    text = f"{percent(efficient)} efficient"
    if not any(one.attempt.measured for one in judged):
        text = f"{percent(efficient)} computing or communicating"
    if pieces:
        text += ": " + ", ".join(pieces)
    if behind:
        text += f"; slower than the others too: {_several(behind)}"
    return text + "."


def _guilty(part: str, share: float, named: list[Straggler], costs: Costs) -> list[Straggler]:
    """The stragglers that a share is owed to; of data and the like only if they are most of it."""
    there = [each for each in named if each.part == part]
    owed = sum(costs[key] for key in {(each.rank, each.host, each.part) for each in there})
    return there if there and (part in COMPUTING or owed > share / 2) else []


def _several(names: list[str]) -> str:
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _findings(
    shares: Mapping[str, float],
    named: list[Straggler],
    judged: list[Judged],
    unread: Collection[int],
) -> Iterator[Finding]:
    attempt = judged[-1].attempt
    for each in _together(named):
        yield Finding(_about(each), _remedy(each))
    if shares.get("communication", 0.0) >= MUCH:
        yield _about_links(shares["communication"], judged)
    if shares.get(UNEVEN, 0.0) >= MUCH:
        yield Finding(
            f"Ranks wait for each other in turn, {percent(shares[UNEVEN])} of the time: none is slower "
            "than the others for long, but in each step another one is.",
            "more work per step evens it out; see whether others use these machines: shoal doctor",
        )
    for part, (text, advice) in _ALIKE.items():
        if shares.get(part, 0.0) >= MUCH and not any(each.part == part for each in named):
            alike = ", on all ranks alike" if attempt.size > 1 else ""
            yield Finding(f"{text} {percent(shares[part])} of the time{alike}.", advice)
    if shares.get("checkpoint", 0.0) >= NOTABLE:
        yield _about_saves(attempt, shares["checkpoint"])
    missing = [rank for rank in attempt.missing if rank not in unread]
    if missing:
        yield Finding(
            f"Nothing was recorded by {_ranks(missing)}.",
            "see whether these ranks reach the run directory",
        )
    left_out = judged[-1].profile.left_out
    if left_out:
        yield Finding(
            f"Few steps were recorded by {_ranks(left_out)}, which are left out.",
            "see whether these ranks could write (df -h)",
        )


def _together(named: list[Straggler]) -> list[Straggler]:
    """One for each rank and part, though it may have been slower in several attempts."""
    found: dict[tuple[int, str | None, str], Straggler] = {}
    for each in named:
        before = found.setdefault((each.rank, each.host, each.part), each)
        until = each.until if each.attempt > before.attempt else before.until
        first = min(before, each, key=lambda one: one.attempt)
        found[each.rank, each.host, each.part] = replace(before, since=first.since, until=until)
    return list(found.values())


def _about(each: Straggler) -> str:
    span = f"from step {each.since:,}" + (f" to {each.until:,}" if each.until is not None else " on")
    label = LABELS[each.part]
    against = f"{duration(each.usual + each.excess)} where the others take {duration(each.usual)}"
    what = "a save" if each.part == "checkpoint" else f"{label} of a step"
    return f"{each.place[0].upper()}{each.place[1:]}: {what} takes {against}, {span}."


def _remedy(each: Straggler) -> str:
    where = f" on {each.host}" if each.host is not None else " on its host"
    if each.part == "wait":
        return f"look at the storage and the cores{where}: shoal doctor"
    if each.part == "checkpoint":
        return f"look at the storage{where}: shoal doctor"
    if each.part in COMPUTING:
        return f"look for a slow or shared device, or cores in use by others,{where}: shoal doctor"
    return f"look at what the script does on rank {each.rank} alone"


def _about_links(share: float, judged: list[Judged]) -> Finding:
    attempt = judged[-1].attempt
    seconds: dict[tuple[str, str, int, str], list[float]] = {}
    for (_, key), traffic in attempt.traffic.items():
        sums = seconds.setdefault(key, [0.0, 0.0, 0.0])
        sums[0] += traffic.seconds
        sums[1] += traffic.bytes
        sums[2] = max(sums[2], traffic.bus)
    hosts = sorted({host for rank in attempt.ranks if (host := attempt.host(rank)) is not None})
    text = f"All ranks wait for each other's data alike: {percent(share)} of the time is communication"
    if seconds:
        kind, group, ranks, backend = max(seconds, key=lambda key: seconds[key][0])
        spent, moved, bus = seconds[kind, group, ranks, backend]
        if spent > 0:
            text += (
                f", most of it {kind} by {backend} over {ranks} ranks (group {group}) at "
                f"{bandwidth(moved / spent)} ({bandwidth(bus)} on the bus)"
            )
    if len(hosts) > 1:
        text += f", over the network between {_several(hosts)}"
    elif hosts:
        text += f", inside of {hosts[0]}"
    return Finding(
        text + ".", "shoal doctor measures each pair of ranks; larger batches send less often"
    )


def _about_saves(attempt: Attempt, share: float) -> Finding:
    saves = attempt.said("save")
    text = f"Saves keep training waiting for {percent(share)} of the time"
    times = [
        (float(event["seconds"]), rank)
        for rank, event in saves
        if isinstance(event.get("seconds"), int | float) and not isinstance(event.get("seconds"), bool)
    ]
    if times:
        longest, rank = max(times)
        text += f"; the longest took {duration(longest)} ({attempt.place(rank)})"
    return Finding(
        text + ".",
        "save less often: run.tick(every=shoal.YoungDaly(mtbf=…)), or to a faster file system: "
        "Run(…, checkpoints=…)",
    )


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {_several(names)}"
