"""A plan with its predicted memory and step time, and the plans of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.distributed.layout import AXES, Layout
from shoal.tools.plan.memory.estimate import RankMemory
from shoal.tools.plan.time.simulation import CollectiveTotal, RankRun
from shoal.tools.plan.time.step_time import StepParts
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.util.units import duration, percent, size


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan with the predicted memory and step time of the rank that needs most memory.

    `change` says how the plan differs from the given one. `memories` and `runs` are those of the traced
    ranks of one replica, in the order of the pipeline; the rank is the one at `place`, and
    `collectives` are its own. `margin` is the number of bytes that a training may need in addition.
    """

    plan: PlannedStep
    memory: RankMemory
    time: StepParts
    available: float
    change: str = "as given"
    margin: int = 0
    place: int = 0
    memories: tuple[RankMemory, ...] = ()
    runs: tuple[RankRun, ...] = ()
    collectives: Mapping[str, CollectiveTotal] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: those of the slowest rank."""
        return float(max((each.time.total for each in self.runs), default=self.time.total))

    @property
    def needed(self) -> float:
        """Bytes that the device must have: with what torch's allocator loses, and the margin."""
        return (self.memory.reserved or self.memory.total) + self.margin

    @property
    def fits(self) -> bool:
        """Whether the machine has them."""
        return self.needed <= self.available

    @property
    def verdict(self) -> str:
        """A sentence: whether it fits, and by how much."""
        rest = self.available - self.needed
        of = f"{size(self.needed)} of {size(self.available)}"
        return f"fits: {of}, {size(rest)} free" if self.fits else f"does not fit: {of}"

    @property
    def family(self) -> str:
        """The axes in use, such as `shard+tensor`."""
        return "+".join(axis for axis in AXES if self.plan.layout.degree(axis) > 1) or "one device"

    @property
    def order(self) -> tuple[float, float]:
        """The place among other predictions: the fastest first."""
        return self.step_seconds, self.needed

    def slower_than(self, fastest: Prediction) -> str:
        """Return by how much a step is slower, and the part that takes longer."""
        slow, fast = self.time.parts, fastest.time.parts
        part = max(slow, key=lambda name: slow[name] - fast[name])
        ratio = self.time.total / fastest.time.total - 1
        more = duration(slow[part] - fast[part])
        return f"{percent(ratio, tenths=True)} slower: {more} more of {part}"


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """A layout that is not among the fastest, why, and its best prediction, if there is one."""

    layout: Layout
    reason: str
    best: Prediction | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest predictions that fit, and layouts with other axes.

    Of `tried` configurations, `fitting` fit, and `evaluated` were not ruled out by lower bounds.
    """

    best: tuple[Prediction, ...]
    rejected: tuple[RejectedLayout, ...]
    tried: int
    fitting: int
    evaluated: int


@dataclass(frozen=True, kw_only=True)
class TriedLayout:
    """A layout with the predicted and the measured seconds of a step, or the end of a failed run."""

    layout: str
    predicted: float
    measured: float | None
    problem: str = ""
