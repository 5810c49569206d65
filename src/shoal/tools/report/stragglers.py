"""Ranks that are slower than the others: which, in which part, since when, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.tools.report.breakdown import (
    OWN,
    RARE,
    SHOWN,
    Profile,
    usual_of_others,
    usual_rank,
)
from shoal.tools.report.history import Array

OTHERS = 0.5
"""If this fraction of a rank's wait would remain with the loader of a usual other rank, the loaders
of all ranks are the cause."""


@dataclass(frozen=True)
class Loading:
    """Loading on a usual rank: the number of `workers` (0: the rank itself), `seconds` for a batch.

    `enough` is the number of workers that would keep up with the rest of a step, `cores` the number of
    cores of the rank; None if it is unknown.
    """

    workers: int
    seconds: float
    enough: int
    cores: int | None


def loader_speed_of(found: Profile) -> Loading | None:
    """Return the loading of a usual rank; None if the ranks did not record it."""
    loads = found.average(found.load)
    if not np.isfinite(loads).all():
        return None
    seconds = float(usual_rank(loads))
    busy = float(_busy(found).max())
    start = found.attempt.starts.get(found.ranks[0], {})
    cores = start.get("cores")
    return Loading(
        workers=found.attempt.workers(found.ranks[0]),
        seconds=seconds,
        enough=max(1, math.ceil(seconds / busy)) if busy > 0 else 1,
        cores=cores if type(cores) is int and cores > 0 else None,
    )


def all_loaders_slow(found: Profile, place: int) -> bool:
    """Return whether the loaders of all ranks are too slow, and cause the wait of one rank for data.

    Ranks with workers wait in turn: while one waits for its batch, the others wait for that rank in a
    collective, and their workers catch up. So a loader that is a little slower than the others gets
    all of the wait. The workers' own time for a batch determines how much of the wait would remain.
    """
    workers = np.array([found.attempt.workers(rank) for rank in found.ranks])
    loads = found.average(found.load)
    if not (workers > 0).all() or not np.isfinite(loads).all():
        return False
    waited = float(found.average(found.mean[SHOWN.index("wait"), place]))
    busy = float(_busy(found)[place])
    theirs = float(usual_of_others(loads / workers)[place])
    return theirs - busy > OTHERS * waited


def _busy(found: Profile) -> Array:
    """Return seconds per step of each rank, without waits for data and for ranks that wait for data."""
    waits = found.mean[SHOWN.index("wait")] + found.mean[SHOWN.index("waiting")]
    return found.average(found.wall - waits)


NOTABLE = 0.03
"""The fraction of a step from which a slower rank is reported."""
CLEAR = 0.1
"""The fraction of the others' time by which a rank must be slower, if that time is long itself."""
CERTAIN = 5.0
"""The number of standard errors by which a rank's mean must exceed that of the others,"""
CHOSEN = 1.5
"""and its multiplier for a segment of the steps, since there are many segments to choose from."""


@dataclass(frozen=True)
class Straggler:
    """A rank that was slower than the others in one part of its steps.

    `since` is the first of these steps, `until` the last if it ended before the attempt did. In a step
    it took `excess` seconds more than the `usual` seconds of the others. `cost` is the increase of the
    time of all steps of the attempt, in seconds per step. It is less than the excess if another rank
    was slower still.
    """

    rank: int
    host: str | None
    part: str
    since: int
    until: int | None
    excess: float
    usual: float
    cost: float
    attempt: float

    @property
    def place(self) -> str:
        """The rank and its host: `rank 2 on node7`."""
        return f"rank {self.rank}" if self.host is None else f"rank {self.rank} on {self.host}"


class RaisedSegment(NamedTuple):
    """A range of values, its end excluded, that are higher than those around it."""

    start: int
    stop: int
    level: float


def find_raised(values: Array, least: float) -> RaisedSegment | None:
    """Return the segment in which `values` are above `least`, if it is statistically significant.

    The two levels, inside and outside, minimize the squared residuals (a change point on each side).
    Single outliers have no effect.
    """
    count = len(values)
    calm, noise = _calmed(values), _noise(values)
    bound = max(least, 2 * noise)
    start, stop = 0, count
    if count >= 3:
        start, stop = _stretch(calm)
        outside = np.delete(calm, slice(start, stop))
        # Among many segments, the shorter ones are more often high by chance.
        chance = noise * (1 + 5 / (stop - start) ** 0.5)
        clear = len(outside) > 0 and calm[start:stop].mean() - outside.mean() >= max(least, chance)
        if not clear or _trimmed(outside) > bound:  # slow in all steps, if at all
            start, stop = 0, count
    level, middle = _trimmed(values[start:stop]), float(np.median(values[start:stop]))
    return RaisedSegment(start, stop, level) if min(level, middle) > bound else None


def find_raised_at_any_scale(values: Array, least: float) -> RaisedSegment | None:
    """Return the same, even where values are high so rarely that only means over several show it."""
    for size in (1, 4, 16):
        groups = len(values) // size
        if size > 1 and groups < 3:
            break
        segment = find_raised(values[: groups * size].reshape(groups, size).mean(axis=1), least)
        if segment is not None:
            stop = len(values) if segment.stop == groups else segment.stop * size
            return RaisedSegment(segment.start * size, stop, segment.level)
    return None


def find_stragglers(found: Profile) -> list[Straggler]:
    """Return all ranks that are notably slower in some part, the costliest first."""
    if len(found.ranks) < 2:
        return []
    named = [each for part in OWN for each in (_rare if part in RARE else _steady)(found, part)]
    return sorted(named, key=lambda each: (-each.cost, -each.excess))


def _steady(found: Profile, part: str) -> Iterator[Straggler]:
    """Yield ranks that are slower in a part of every step, in all windows or in consecutive ones."""
    means = found.mean[SHOWN.index(part)]
    compared = usual_of_others(means.T).T
    least = max(NOTABLE * found.usual_seconds, CLEAR * float(np.median(compared)))
    for place, (mine, theirs) in enumerate(zip(means, compared, strict=True)):
        segment = find_raised_at_any_scale(mine - theirs, least)
        if segment is None or not _lasting(found, part, place, segment):
            continue
        if part == "wait" and all_loaders_slow(found, place):
            continue
        usual = float(np.median(theirs[segment.start : segment.stop]))
        yield _straggler(found, part, place, segment, usual, _since(found, part, place, segment.start))


def _lasting(found: Profile, part: str, place: int, segment: RaisedSegment) -> bool:
    """Return whether a rank is slower by more than chance explains, given the scatter of the steps.

    If samples differ in length, each rank is the slowest in some steps, and over few steps the mean of
    one of them is well above the others'. A rank that stalls occasionally scatters too, but the others
    do not.
    """
    _, taken, compared = _compared(found, part, segment.start, segment.stop)
    excess = taken[place] - compared[place]
    theirs = float(np.median(np.delete(taken, place, axis=0).std(axis=1)))
    scatter = min(float(excess.std()), theirs * 2**0.5)
    whole = segment.stop - segment.start == len(found.first)
    bound = CERTAIN if whole else CHOSEN * CERTAIN
    return bool(segment.level * np.sqrt(len(excess)) > bound * scatter)


def _since(found: Profile, part: str, place: int, start: int) -> int:
    """Return the step at which a rank became slower: the least-squares change point near a window."""
    if start == 0:
        return int(found.first[0])
    steps, taken, compared = _compared(found, part, start - 1, start + 1)
    values = taken[place] - compared[place]
    values = np.minimum(values, 2 * np.quantile(values, 0.75) + 1e-9)  # one long step is not a change
    count = len(values)
    before = np.arange(1, count)
    sums = np.cumsum(values)[:-1]
    gap = (sums[-1] + values[-1] - sums) / (count - before) - sums / before
    return int(steps[int(np.argmax(before * (count - before) * gap * np.abs(gap))) + 1])


def _rare(found: Profile, part: str) -> Iterator[Straggler]:
    """Yield ranks that are slower in rare work, such as a save, judged by the steps that have it."""
    steps, taken, compared = _compared(found, part, 0, len(found.first))
    there = taken.max(axis=0) > 0.1 * found.usual_seconds
    if not there.any():
        return
    for place in range(len(found.ranks)):
        usual, excess = compared[place, there], (taken - compared)[place, there]
        segment = RaisedSegment(0, len(found.first), float(np.median(excess)))
        per_step = float(np.maximum(excess, 0).sum()) / found.steps
        typical = float(np.median(usual))
        if segment.level > 0.25 * typical and per_step > NOTABLE * found.usual_seconds:
            yield _straggler(found, part, place, segment, typical, int(steps[there][0]))


def _compared(found: Profile, part: str, start: int, stop: int) -> tuple[Array, Array, Array]:
    """Return the steps in some windows, each rank's time in a part, and that of the usual others."""
    aligned = found.aligned
    begin, end = (found.begin + int(found.count[:edge].sum()) for edge in (start, stop))
    taken = aligned.column(part, begin, end).astype(np.float64)
    return aligned.steps[begin:end], taken, usual_of_others(taken.T).T


def _straggler(
    found: Profile, part: str, place: int, segment: RaisedSegment, usual: float, since: int
) -> Straggler:
    start, stop, level = segment
    surplus = found.surplus[SHOWN.index(part), place, start:stop] * found.count[start:stop]
    return Straggler(
        rank=found.ranks[place],
        host=found.attempt.host(found.ranks[place]),
        part=part,
        since=since,
        until=int(found.last[stop - 1]) if stop < len(found.first) else None,
        excess=level,
        usual=usual,
        cost=max(0.0, float(surplus.sum()) / found.steps),
        attempt=found.attempt.began,
    )


def _calmed(values: Array) -> Array:
    """Return values without single outliers: the median of each value and its neighbours."""
    if len(values) < 3:
        return values
    padded = np.concatenate([values[1:2], values, values[-2:-1]])
    return np.asarray(np.median(np.stack([padded[:-2], padded[1:-1], padded[2:]]), axis=0))


def _noise(values: Array) -> float:
    """Return the scatter of values, regardless of changes of their level."""
    if len(values) < 3:
        return 0.0
    return float(np.median(np.abs(np.diff(values)))) * 1.4826 / 2**0.5


def _trimmed(values: Array) -> float:
    """Return the mean without the highest tenth, since one long wait is not typical."""
    kept = np.sort(values)[: max(1, int(0.9 * len(values)))]
    return float(kept.mean())


def _stretch(values: Array) -> tuple[int, int]:
    """Return start and end of the segment that differs most from the rest, as the higher one."""
    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, stop = np.triu_indices(count + 1, 1)
    inside, length = sums[stop] - sums[start], stop - start
    rest = np.maximum(count - length, 1)
    gap = inside / length - (sums[-1] - inside) / rest
    gain = np.where((length < count) & (gap > 0), length * (count - length) * gap**2, 0.0)
    best = int(np.argmax(gain))
    return (int(start[best]), int(stop[best])) if gain[best] > 0 else (0, count)
