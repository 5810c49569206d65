"""The results of one job: its pace, its parts on a typical rank, and the rank that others wait for.

Pure functions of arrays with one row for each rank and one column for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
