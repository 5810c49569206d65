"""The time of an attempt's steps by part, rank and window.

A rank records how long it waited inside collectives. The wait of the rank that waited least is
communication. Other ranks spent the time above it waiting for that rank, the slowest of the step.
So a step takes as long as its slowest rank, and the slowest rank's excess over a usual rank
is its cost to all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from shoal.tools.report.history import PARTS, Array, Attempt

COMMUNICATION = PARTS.index("communication")
UPDATE = PARTS.index("update")

SHOWN = (
    "forward",
    "backward",
    "update",
    "communication",
    "waiting",
    "wait",
    "transfer",
    "checkpoint",
    "evaluation",
    "other",
)
"""The parts as users see them; they add up to the time of a step."""

LABELS = {
    "forward": "forward",
    "backward": "backward",
    "update": "optimizer",
    "communication": "communication",
    "waiting": "waiting for the slowest",
    "wait": "data",
    "transfer": "transfer to the device",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "the script's own time",
}

COMPUTING = ("forward", "backward", "update")
OWN = tuple(part for part in SHOWN if part not in ("communication", "waiting"))
"""Parts in which a rank can be slower than others, because it spends them on its own work."""
RARE = ("checkpoint", "evaluation")
"""Parts that are long in few steps and absent in the others."""

WINDOWS = 64
SMALLEST = 16
COVERED = 0.5
"""A rank with a smaller fraction of the steps is left out."""
HELD = 1 << 20
"""Number of (step, rank) pairs processed at a time."""


@dataclass(frozen=True)
class AlignedSteps:
    """The steps that all ranks of an attempt have recorded, with the rows of each rank.

    `left_out` are ranks with too few.
    """

    attempt: Attempt
    ranks: tuple[int, ...]
    steps: Array
    rows: tuple[Array, ...]
    left_out: tuple[int, ...]

    def column(self, name: str, first: int, last: int) -> Array:
        """Return one column, or "other", over a range of steps, a row for each rank."""
        if name == "other":
            return np.asarray(self.cube(first, last)[0][-1])
        return np.stack([rows[name][first:last] for rows in self.rows])

    def cube(self, first: int, last: int) -> tuple[Array, Array]:
        """Return seconds by part (PARTS and "other"), rank and step, and wall time by rank and step."""
        wall = self.column("wall", first, last)
        cube = np.empty((len(PARTS) + 1, *wall.shape), np.float32)
        for index, part in enumerate(PARTS):
            cube[index] = self.column(part, first, last)
        cube[-1] = wall - cube[:-1].sum(axis=0)
        return cube, wall


@dataclass(frozen=True)
class Profile:
    """Mean seconds per step of `aligned` in consecutive `windows`, from its step number `begin` on.

    `mean[part, rank, window]` has the parts of SHOWN, `wall[rank, window]` their sum. `usual[part,
    window]` is the time of a usual rank. `surplus[part, rank, window]` is a rank's excess over it in
    the steps in which the rank was the slowest, averaged over all steps of the window. `load[rank,
    window]` is the time to make a batch; NaN if it was not recorded.
    """

    aligned: AlignedSteps
    begin: int
    first: Array
    last: Array
    count: Array
    time: Array
    mean: Array
    wall: Array
    usual: Array
    surplus: Array
    loss: Array
    samples: Array
    counted: Array
    load: Array

    @property
    def attempt(self) -> Attempt:
        """The attempt whose steps they are."""
        return self.aligned.attempt

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded the steps."""
        return self.aligned.ranks

    @property
    def seconds(self) -> float:
        """The mean time of a step."""
        return float(self.average(self.wall).mean())

    @property
    def usual_seconds(self) -> float:
        """The median over the windows of the time of a step."""
        return float(np.median(self.wall.mean(axis=0)))

    @property
    def steps(self) -> int:
        """The number of steps in all windows."""
        return int(self.count.sum())

    def average(self, values: Array) -> Array:
        """Return the mean over all steps of values whose last axis is the windows."""
        weights = self.count / max(1, self.count.sum())
        return np.asarray(values @ weights)

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return the mean seconds per step of one rank, by part."""
        means = self.average(self.mean[:, self.ranks.index(rank)])
        return {part: float(each) for part, each in zip(SHOWN, means, strict=True)}


def align_ranks(attempt: Attempt) -> AlignedSteps | None:
    """Return the steps that the ranks of an attempt have in common; None if there is none."""
    rows = {rank: attempt.ticks(rank) for rank in attempt.ranks}
    most = max((len(each) for each in rows.values()), default=0)
    ranks = tuple(rank for rank, each in rows.items() if len(each) >= max(1, COVERED * most))
    if not ranks:
        return None
    shortest = min(len(rows[rank]) for rank in ranks)
    aligned = [rows[rank][:shortest] for rank in ranks]
    steps = aligned[0]["step"]
    if not all(np.array_equal(each["step"], steps) for each in aligned):  # some lines were lost
        steps = reduce(np.intersect1d, [rows[rank]["step"] for rank in ranks])
        if not len(steps):
            return None
        aligned = [
            rows[rank][np.intersect1d(rows[rank]["step"], steps, return_indices=True)[1]]
            for rank in ranks
        ]
    left_out = tuple(rank for rank in rows if rank not in ranks)
    return AlignedSteps(attempt, ranks, steps, tuple(aligned), left_out)


def count_warm_up_steps(aligned: AlignedSteps) -> int:
    """Return how many of the first steps differ from the rest: compilation, checks, cold caches."""
    count = len(aligned.steps)
    if count < 4:
        return 0
    head = min(20, count // 4)
    end = min(count, max(64, 4 * head))
    cube, wall = aligned.cube(0, end)
    rare = sum(cube[PARTS.index(part)] for part in RARE)
    took = (wall - rare).max(axis=0)
    slow = np.flatnonzero(took[:head] > 2 * np.median(took[head:]))
    return int(slow[-1]) + 1 if len(slow) else 1


def window_edges(first: int, last: int, windows: int | None = None) -> Array:
    """Return the starts of windows of about equal length, and the end of the last."""
    count = last - first
    if windows is None:
        windows = min(WINDOWS, count // SMALLEST)
    return np.linspace(first, last, max(1, min(windows, count)) + 1).astype(int)


def profile(attempt: Attempt, *, last: int | None = None, windows: int | None = None) -> Profile | None:
    """Return the time of an attempt's steps by part; None if no rank has recorded a step.

    `last` limits it to the newest steps. `windows` is the number of windows. The first steps, which
    warm up, do not count.
    """
    aligned = align_ranks(attempt)
    if aligned is None:
        return None
    begin, end = count_warm_up_steps(aligned), len(aligned.steps)
    if last is not None:
        begin = max(begin, end - last)
    bounds = window_edges(begin, end, windows)
    found = [_window(aligned, int(a), int(b)) for a, b in pairwise(bounds)]
    sums = {name: np.stack([each[name] for each in found], axis=-1) for name in found[0]}
    return Profile(
        aligned,
        begin,
        first=aligned.steps[bounds[:-1]],
        last=aligned.steps[bounds[1:] - 1],
        count=np.diff(bounds),
        **sums,
    )


def usual_rank(means: Array) -> Array:
    """Return the value of a usual rank, from values by rank (the last axis): their lower median.

    It is the reference for a rank that is slower than most, so that rank must not affect it: of two
    ranks it is the faster one, and also of three, since another of them may be slow as well.
    """
    count = means.shape[-1]
    place = max(0, (count - 2) // 2)
    return np.partition(means, place, axis=-1)[..., place]


def usual_of_others(means: Array) -> Array:
    """Return for each rank (the last axis) the median of the others; the lower of two."""
    count = means.shape[-1]
    place = max(0, (count - 2) // 2)
    following = min(place + 1, count - 1)
    ordered = np.partition(means, (place, following), axis=-1)
    below, above = ordered[..., place, None], ordered[..., following, None]
    return np.where(means <= below, above, below)


def _window(aligned: AlignedSteps, first: int, last: int) -> dict[str, Array]:
    """Return all fields of a Profile for one window."""
    size = last - first
    own = (len(OWN), len(aligned.ranks))
    total = {"mean": np.zeros((len(SHOWN), own[1])), "wall": np.zeros(own[1])}
    slowest_sum, slowest_steps = np.zeros(own), np.zeros(own[1])
    for begin, end in split_steps(first, last, own[1]):
        shown, wall, slowest, arrived = _divided(aligned, begin, end)
        total["mean"] += shown.sum(axis=2, dtype=np.float64) / size
        total["wall"] += wall.sum(axis=1, dtype=np.float64) / size
        slowest_sum += np.einsum("prs,rs->pr", arrived, slowest, dtype=np.float64)
        slowest_steps += slowest.sum(axis=1, dtype=np.float64)
    index = [SHOWN.index(part) for part in OWN]
    typical = usual_rank(total["mean"][index])
    surplus = np.zeros((len(SHOWN), own[1]))
    surplus[index] = (slowest_sum - typical[:, None] * slowest_steps) / size
    shared = np.zeros(len(SHOWN))
    shared[index] = typical
    shared[SHOWN.index("communication")] = total["mean"][SHOWN.index("communication")].mean()
    load = aligned.column("load", first, last).mean(axis=1, dtype=np.float64)
    progress = _progress(aligned, first, last)
    return {**total, "usual": shared, "surplus": surplus, "load": load, **progress}


def split_steps(first: int, last: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield a range of steps in pieces that are small enough to be processed at once."""
    length = max(1, HELD // ranks)
    for begin in range(first, last, length):
        yield begin, min(begin + length, last)


def _divided(aligned: AlignedSteps, first: int, last: int) -> tuple[Array, Array, Array, Array]:
    """Return seconds by part of SHOWN, wall time, how far each rank was the slowest, and its excess.

    A rank's work after the last collective of a step, its update, makes others wait in the next step.
    """
    cube, wall = aligned.cube(first, last)
    inside = cube[COMMUNICATION]
    least = inside.min(axis=0)
    waiting = inside - least
    slowest = _slowest(inside)
    parts = {**dict(zip((*PARTS, "other"), cube, strict=True)), "waiting": waiting}
    parts["communication"] = np.broadcast_to(least, inside.shape)
    shown = np.stack([parts[part] for part in SHOWN])
    arrived = np.stack([parts[part] for part in OWN])
    before = max(0, first - 1)
    updates = aligned.column("update", before, last - 1) if last > 1 else cube[UPDATE]
    arrived[OWN.index("update"), :, -updates.shape[1] :] = updates
    return shown, wall, slowest, arrived


def _slowest(inside: Array) -> Array:
    """Return how far each rank was the slowest of each step, by its time waiting in collectives.

    For steps without collectives, such as those between two averagings of local SGD, the next step that
    has one decides. If none follows, all ranks get an equal fraction.
    """
    ranks, count = inside.shape
    met = np.where(inside.max(axis=0) > 0, np.arange(count), count)
    following = np.minimum.accumulate(met[::-1])[::-1]
    known = np.flatnonzero(following < count)
    found = np.full_like(inside, 1 / ranks)
    found[:, known] = 0
    found[inside[:, following[known]].argmin(axis=0), known] = 1
    return found


def _progress(aligned: AlignedSteps, first: int, last: int) -> dict[str, Array]:
    """Return the loss of the first rank, the times at which its steps ended, and the sample counts."""
    rows = aligned.rows[0][first:last]
    loss = rows["loss"][np.isfinite(rows["loss"])]
    return {
        "loss": np.asarray(loss.mean(dtype=np.float64) if len(loss) else np.nan),
        "time": rows["time"][-1],
        "samples": np.asarray(rows["size"].mean(dtype=np.float64)),
        "counted": np.asarray(rows["counted"].mean(dtype=np.float64)),
    }
