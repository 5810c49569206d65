"""Check whether the loaders of the ranks keep up, and how many workers would be enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.tools.report.breakdown import SHOWN, Profile, usual_of_others, usual_rank
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
    """Return the loading of a usual rank of an attempt; None if the ranks did not record it."""
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
