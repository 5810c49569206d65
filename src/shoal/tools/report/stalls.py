"""Steps in which all ranks together take much longer than usual, and how often they occur.

A single slow rank shows in comparison with the others. A stall of all ranks in the same step, such as
garbage collection every 50th step, shows only in comparison with other steps: the mean of a part
over steps is above its median.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.tools.report.breakdown import COMPUTING, AlignedSteps, Profile, split_steps
from shoal.tools.report.history import PARTS, Array

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
