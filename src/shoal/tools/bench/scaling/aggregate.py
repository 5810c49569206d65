"""The figures of a study: a row for each number of processes of each curve, from repeated jobs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shoal.tools.bench.scaling.configurations import (
    Configuration,
    ScalingCurve,
    StudyOptions,
    list_curves,
    make_configuration,
)
from shoal.tools.bench.scaling.job_summary import PARTS, SlowestRank, StepTimes
from shoal.util.grouping import group_by
from shoal.util.units import counted

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
    told = "; ".join(f"{size} on {_some(sorted(used[size]))}" for size in sizes)
    return f"not all sizes ran on the same nodes, which may differ in speed: {told}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - SOME
    return ", ".join(names[:SOME]) + (f" and {more} more" if more > 0 else "")


def disturbance_note(repeats: Sequence[Repeat]) -> str | None:
    """Return a note if the machine was busy with other work."""
    most = max(repeats, key=lambda repeat: repeat.others, default=None)
    if most is None or most.others < BUSY:
        return None
    return (
        f"other programs kept up to {most.others:.1f} of {most.cores} cores busy: "
        "take these figures as a rough guide"
    )
