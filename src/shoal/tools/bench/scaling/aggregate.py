"""The figures of a job, and of a study: a row for each number of processes of each curve.

A job has a pace, parts on a typical rank, and a rank that others wait for: functions of arrays with one
row for each rank and one column for each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shoal.tools.bench.scaling.configurations import (
    Configuration,
    ScalingCurve,
    StudyOptions,
    list_curves,
    make_configuration,
)
from shoal.util.grouping import group_by
from shoal.util.units import counted, first_few

Times = NDArray[np.float64]

PARTS = (
    "wait",
    "transfer",
    "forward",
    "backward",
    "communication",
    "waiting",
    "update",
    "checkpoint",
    "evaluation",
    "other",
)
"""Parts of a step with their labels. `waiting` is for the slowest rank, `communication` the rest of a
rank's time inside collectives, and `other` the script's own time."""
SHOWN = {
    "wait": "waiting for data",
    "transfer": "copies to the device",
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "waiting": "waiting for the slowest",
    "update": "optimizer",
    "checkpoint": "saves",
    "evaluation": "evaluation",
    "other": "the script's own",
}
FEWEST = 2
"""Minimum number of steps that have a spread."""
ALONE = 0.75
"""Fraction of steps in which one of two ranks must be the slower one to be reported."""
MOSTLY = 0.5
"""The same for one of three or more ranks."""


@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank that others wait for, the fraction of steps in which they do, and its slow part."""

    rank: int
    host: str
    share: float
    part: str


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The steps of a job that count. Times in seconds; `walls` are those of each step on rank 0.

    `parts` are the seconds per step on a typical rank; their sum is its time per step. `ranks` has the
    same for each rank.
    """

    samples: int
    seconds: float
    walls: tuple[float, ...]
    parts: Mapping[str, float]
    ranks: tuple[Mapping[str, float], ...]
    blame: SlowestRank | None
    loss: float | None

    def __post_init__(self) -> None:
        """Raise ValueError if they took no time, or are too few."""
        if not self.seconds > 0 or len(self.walls) < FEWEST:
            raise ValueError(f"{len(self.walls)} steps in {self.seconds} s")

    @property
    def rate(self) -> float:
        """Samples per second, over all processes."""
        return self.samples / self.seconds


def summarize(
    walls: Times,
    own: Mapping[str, Times],
    samples: Sequence[int],
    hosts: Sequence[str],
    loss: float | None,
) -> StepTimes:
    """Return the figures of all ranks; `own` has the recorded parts, `samples` those of each step."""
    communication = own.get("communication", np.zeros_like(walls))
    least = communication.min(axis=0, keepdims=True)
    recorded = [own[part] for part in own if part in PARTS]
    other = walls - np.sum(recorded, axis=0) if recorded else walls
    split = {
        **{part: values for part, values in own.items() if part in PARTS},
        "communication": np.broadcast_to(least, walls.shape),
        "waiting": communication - least,
        "other": other,
    }
    means = {part: values.mean(axis=1) for part, values in split.items()}
    ranks = tuple(
        {part: float(means[part][rank]) for part in PARTS if part in means}
        for rank in range(len(walls))
    )
    patience = sorted(range(len(walls)), key=lambda rank: -means["waiting"][rank])
    return StepTimes(
        samples=int(sum(samples)),
        seconds=float(walls[0].sum()),
        walls=tuple(map(float, walls[0])),
        parts=ranks[patience[(len(patience) - 1) // 2]],
        ranks=ranks,
        blame=_blame(split["waiting"], ranks, hosts),
        loss=loss,
    )


def _blame(
    waiting: Times, ranks: Sequence[Mapping[str, float]], hosts: Sequence[str]
) -> SlowestRank | None:
    """Return the rank that the others wait for, if it is mostly the same."""
    size = len(ranks)
    if size == 1 or not waiting.any():
        return None
    counted = np.bincount(waiting.argmin(axis=0), minlength=size) / waiting.shape[1]
    slowest = int(counted.argmax())
    if counted[slowest] < (ALONE if size == 2 else MOSTLY):
        return None
    others = [rank for number, rank in enumerate(ranks) if number != slowest]
    excess = {
        part: seconds - float(np.median([rank[part] for rank in others]))
        for part, seconds in ranks[slowest].items()
        if part not in ("communication", "waiting")
    }
    return SlowestRank(
        rank=slowest,
        host=hosts[slowest],
        share=float(counted[slowest]),
        part=max(excess, key=lambda part: excess[part]),
    )


BUSY = 0.5
"""Cores used by other programs from which a note is added."""
SOME = 4
"""Maximum number of nodes that are listed."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """The result of one job: figures, or the reason why there are none. `seconds` is its duration.

    `hosts` and `devices` are those of the ranks in their order. `cores` is the number of cores of its
    machine, 0 if there were several; `others` is the mean number of these that other programs used.
    """

    key: str
    round: int
    began: float
    seconds: float
    reason: str | None = None
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    cores: int = 0
    parameters: int | None = None
    others: float = 0.0
    measured: StepTimes | None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of repeats, with the lowest and the highest."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return the median, the lowest and the highest value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One number of processes of a curve. Rates in samples per second, times in seconds.

    `iteration` is the median step and its quartiles, over all repeats. `speedup` is relative to `base`,
    the smallest number of processes that ran, round by round; `efficiency` is the speed-up divided by
    the ratio of the numbers of processes. `rounds` has the parts of each round; `parts` is their mean.
    If no job succeeded, there is a `reason` instead.
    """

    curve: ScalingCurve
    configuration: Configuration
    base: Configuration | None
    repeats: int
    failed: int
    reason: str | None
    rate: Spread | None = None
    iteration: Spread | None = None
    speedup: Spread | None = None
    efficiency: Spread | None = None
    parts: Mapping[str, float] | None = None
    rounds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    blame: SlowestRank | None = None
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.configuration.processes

    @property
    def mean(self) -> float:
        """The mean seconds of a step on a typical process."""
        return sum((self.parts or {}).values())

    @property
    def synchronisation(self) -> float:
        """The seconds of a step inside collectives, including waiting."""
        parts = self.parts or {}
        return parts.get("communication", 0.0) + parts.get("waiting", 0.0)


def scaling_points(options: StudyOptions, repeats: Sequence[Repeat]) -> list[ScalingPoint]:
    """Return the rows of all curves, each by number of processes; only for jobs that have run."""
    by_key = group_by(repeats, lambda repeat: repeat.key)
    found = []
    for curve in list_curves(options):
        base: tuple[Configuration, list[Repeat]] | None = None
        for processes in sorted(set(options.processes)):
            chosen = make_configuration(options, curve, processes)
            own = by_key.get(chosen.key, [])
            if not own:
                continue
            if base is None and any(repeat.measured for repeat in own):
                base = chosen, own
            found.append(_row(curve, chosen, own, base))
    return found


def _row(
    curve: ScalingCurve,
    chosen: Configuration,
    repeats: Sequence[Repeat],
    base: tuple[Configuration, list[Repeat]] | None,
) -> ScalingPoint:
    good = {repeat.round: repeat.measured for repeat in repeats if repeat.measured is not None}
    reasons = [repeat.reason for repeat in repeats if repeat.reason is not None]
    row = ScalingPoint(
        curve=curve,
        configuration=chosen,
        base=base and base[0],
        repeats=len(good),
        failed=len(reasons),
        reason=reasons[-1] if reasons and not good else None,
        notes=tuple(machine_notes(repeats)),
    )
    if not good or base is None:
        return row
    start, before = base
    theirs = {repeat.round: repeat.measured for repeat in before if repeat.measured is not None}
    shared = sorted(good.keys() & theirs.keys())
    usual = statistics.median(each.rate for each in theirs.values())
    gains = [good[number].rate / theirs[number].rate for number in shared] or [
        each.rate / usual for each in good.values()
    ]
    more = chosen.processes / start.processes
    walls = [wall for each in good.values() for wall in each.walls]
    low, middle, high = statistics.quantiles(walls, n=4, method="inclusive")
    blames = [each.blame for each in good.values() if each.blame is not None]
    return replace(
        row,
        rate=spread_of([each.rate for each in good.values()]),
        iteration=Spread(median=middle, low=low, high=high),
        speedup=spread_of(gains),
        efficiency=spread_of([gain / more for gain in gains]),
        parts={
            part: statistics.fmean(each.parts.get(part, 0.0) for each in good.values())
            for part in PARTS
        },
        rounds={number: each.parts for number, each in good.items()},
        blame=_agreed(blames, len(good)),
    )


def _agreed(blames: Sequence[SlowestRank], repeats: int) -> SlowestRank | None:
    """Return the rank that most repeats blame."""
    for blame in blames:
        if 2 * sum(other.rank == blame.rank for other in blames) > repeats:
            return blame
    return None


def machine_notes(repeats: Sequence[Repeat]) -> list[str]:
    """Return notes on the machines of these jobs."""
    found: dict[str, None] = {}
    for repeat in repeats:
        for host in dict.fromkeys(repeat.hosts):
            here = [number for number, each in enumerate(repeat.hosts) if each == host]
            devices = {repeat.devices[number] for number in here}
            if any(device.startswith("cuda") for device in devices):
                if len(devices) < len(here):
                    gpus = counted(len(devices), "GPU")
                    found[f"more processes than GPUs: {len(here)} on {gpus} of {host}"] = None
            elif 0 < repeat.cores < len(here):
                cores = counted(repeat.cores, "core")
                found[f"more processes than cores: {len(here)} on {cores} of {host}"] = None
        if repeat.reason is not None and any(other.measured for other in repeats):
            found[f"round {repeat.round + 1} failed: {repeat.reason}"] = None
    return list(found)


def all_notes(rows: Sequence[ScalingPoint], repeats: Sequence[Repeat]) -> list[str]:
    """Return all notes on a study, each once."""
    found = dict.fromkeys(note for row in rows for note in row.notes)
    return [*found, *filter(None, (different_nodes_note(repeats), disturbance_note(repeats)))]


def different_nodes_note(repeats: Sequence[Repeat]) -> str | None:
    """Return a note if more processes did not have the nodes that fewer had."""
    used: dict[int, set[str]] = {}
    for repeat in repeats:
        if repeat.hosts:
            used.setdefault(len(repeat.hosts), set()).update(repeat.hosts)
    sizes = sorted(used)
    if all(used[less] <= used[more] for less, more in pairwise(sizes)):
        return None
    told = "; ".join(f"{size} on {first_few(sorted(used[size]), SOME)}" for size in sizes)
    return f"not all sizes ran on the same nodes, which may differ in speed: {told}"


def disturbance_note(repeats: Sequence[Repeat]) -> str | None:
    """Return a note if the machine was busy with other work."""
    most = max(repeats, key=lambda repeat: repeat.others, default=None)
    if most is None or most.others < BUSY:
        return None
    return (
        f"other programs kept up to {most.others:.1f} of {most.cores} cores busy: "
        "take these figures as a rough guide"
    )
