"""The number of samples of each rank in a batch, by the measured speed of the ranks.

The rule is pure functions of measured times; `SpeedBalance` measures while a Loader yields batches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal.distributed.world import World
from shoal.telemetry.step_timer import (
    BACKWARD,
    CHECKPOINT,
    EVALUATION,
    FORWARD,
    OTHER,
    TRANSFER,
    WAIT,
    Spent,
)

Shares: TypeAlias = tuple[int, ...]
"""The number of samples of each data-parallel rank in a batch of full size."""

WINDOWS = 8
"""Windows in a row that a change must have made faster."""
LEAST_GAIN = 1.1
"""Ratio by which it must have made each of them faster."""
MOST = 2
"""The largest multiple of an equal number of samples that a rank gets, since its memory is limited."""


@dataclass(frozen=True)
class SpeedWindow:
    """The mean time of some steps: `own` of each rank without its waits for others, and `step` in all.

    In seconds per step.
    """

    own: tuple[float, ...]
    step: float


@dataclass(frozen=True)
class ShareChange:
    """New numbers of samples from a position on.

    `gain` is the predicted ratio of step times before and after; None in a change that is replayed.
    """

    position: int
    shares: Shares
    gain: float | None = None


def equal_shares(size: int, ranks: int) -> Shares:
    """Return the numbers of samples of ranks of equal speed, as a Loader without measurement cuts."""
    return tuple((rank + 1) * size // ranks - rank * size // ranks for rank in range(ranks))


def better_shares(
    shares: Shares, windows: Sequence[SpeedWindow], *, least: int = 1
) -> tuple[Shares, float] | None:
    """Return better numbers of samples with their predicted gain, or None if they are good enough.

    Each rank gets samples in proportion to its speed, the median of the windows. They are better only
    if they would have made each of the last WINDOWS windows faster by LEAST_GAIN: noise slows another
    rank in another window. No rank gets fewer than `least` samples.
    """
    if len(windows) < WINDOWS:
        return None
    last = windows[-WINDOWS:]
    cost = [[own / max(1, n) for own, n in zip(each.own, shares, strict=True)] for each in last]
    speeds = [1 / max(1e-12, statistics.median(rank)) for rank in zip(*cost, strict=True)]
    found = _apportion(sum(shares), speeds, least)
    gains = [
        each.step / (each.step - max(each.own) + max(n * c for n, c in zip(found, costs, strict=True)))
        for each, costs in zip(last, cost, strict=True)
    ]
    if found == shares or min(gains) < LEAST_GAIN:
        return None
    return found, statistics.median(gains)


def _apportion(total: int, speeds: Sequence[float], least: int) -> Shares:
    """Split `total` in proportion to `speeds`, each part from `least` to MOST times an equal part."""
    ranks = len(speeds)
    most = max(least, MOST * total // ranks)
    parts = [total * speed / sum(speeds) for speed in speeds]
    found = [min(most, max(least, int(part))) for part in parts]
    while (rest := total - sum(found)) != 0:
        one = 1 if rest > 0 else -1
        free = [r for r in range(ranks) if least <= found[r] + one <= most]
        if not free:
            break
        nearest = max(free, key=lambda r: (one * (parts[r] - found[r]), r))
        found[nearest] += one
    return tuple(found)


WINDOW_STEPS = 8
"""The least number of steps of a window."""
WINDOW_SECONDS = 1.0
"""The least duration of a window, so that one time slice of another process does not count."""

_OWN = (OTHER, WAIT, TRANSFER, FORWARD, BACKWARD)
"""The parts of a step in which a rank does not wait for others, and which grow with its samples."""
_RARE = (CHECKPOINT, EVALUATION)


class SpeedBalance:
    """The numbers of samples of the ranks of a Loader, by measured speed.

    Each rank gets at least `least`. A window has at least `steps` steps and lasts about `seconds`.
    `shares` has the current ones. Changes that an earlier attempt recorded are replayed, and until its
    last position nothing is measured.
    """

    def __init__(
        self,
        world: World,
        batch_size: int,
        *,
        least: int,
        steps: int = WINDOW_STEPS,
        seconds: float = WINDOW_SECONDS,
    ) -> None:
        self._world = world
        self._least = least
        self._shortest = steps, seconds
        self.shares = equal_shares(batch_size, world.data_size)
        self.changes: list[ShareChange] = []
        """The changes that no event has recorded yet."""
        self._recorded: dict[int, Shares] = {}
        self._replayed_until = 0
        self._windows: deque[SpeedWindow] = deque(maxlen=WINDOWS)
        self._steps, self._length = 0, steps
        self._begun: Spent = ()

    def begin(self) -> None:
        """Begin a window, with the first batch of a loop."""
        self._steps, self._begun = 0, self._world.timeline.take()

    def after_step(self, position: int) -> bool:
        """Return whether batches from `position` on are split in another way. Collective.

        Ranks gather their times once in each window. All of them decide the same from the same times.
        """
        if position in self._recorded or position < self._replayed_until:
            shares = self._recorded.get(position, self.shares)
            return shares != self.shares and self._change(ShareChange(position, shares))
        self._steps += 1
        if self._steps < self._length:
            return False
        window = self._window()
        self._windows.append(window)
        steps, seconds = self._shortest
        self._length = max(steps, math.ceil(seconds / max(window.step, 1e-6)))
        self.begin()
        found = better_shares(self.shares, list(self._windows), least=self._least)
        return found is not None and self._change(ShareChange(position, *found))

    def load(self, saved: Sequence[int]) -> Shares | None:
        """Continue with the numbers of a checkpoint, and return them.

        Returns None, for equally many, if they are of another number of ranks or batch size.
        """
        self._windows.clear()
        self.changes.clear()
        self._recorded, self._replayed_until = {}, 0
        fits = self._fits(saved)
        self.shares = tuple(saved) if fits else equal_shares(sum(self.shares), len(self.shares))
        return self.shares if fits else None

    def replay(self, changes: Mapping[int, Sequence[int]], until: int, *, position: int) -> bool:
        """Repeat the changes of an earlier attempt, by position, and measure from `until` on.

        Returns whether the batch at `position`, the next one, is split in another way.
        """
        self._recorded = {p: tuple(shares) for p, shares in changes.items() if self._fits(shares)}
        self._replayed_until = until
        return position in self._recorded and self.after_step(position)

    def take_changes(self) -> list[ShareChange]:
        """Return the changes since the last call."""
        changes, self.changes = self.changes, []
        return changes

    def _fits(self, shares: Sequence[int]) -> bool:
        return len(shares) == len(self.shares) and sum(shares) == sum(self.shares)

    def _change(self, change: ShareChange) -> bool:
        self.shares = change.shares
        self.changes.append(change)
        self._windows.clear()
        self.begin()
        return True

    def _window(self) -> SpeedWindow:
        """Return the mean times of the window that ends now, on all ranks. Collective."""
        now, steps = self._world.timeline.take(), self._steps
        spent = [(b - a) / 1e9 / steps for a, b in zip(self._begun, now, strict=True)]
        own = sum(spent[part] for part in _OWN)
        step = sum(spent[1:]) - sum(spent[part] for part in _RARE)
        own_times = [0.0] * self._world.data_size
        longest = 0.0
        for rank, seconds, whole in self._world.gather((self._world.data_rank, own, step)):
            own_times[rank] = max(own_times[rank], seconds)
            longest = max(longest, whole)
        return SpeedWindow(tuple(own_times), longest)
