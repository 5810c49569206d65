"""What the page shows of a run at one moment, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "reading",
    "absent",
    "starting",
    "running",
    "silent",
    "ended",
    "preempted",
    "interrupted",
    "failed",
]
"""`reading` is a run whose events have not been read yet, `absent` one that is not there yet, `silent`
one of which nothing has been heard for long."""

OVER: tuple[Kind, ...] = ("ended", "preempted", "interrupted", "failed")
"""The run has said itself that it ended."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run is, for how many seconds it has been so, and why."""

    kind: Kind
    since: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is: positions and sizes in samples.

    `goal` is the position at which it ends, `left` the seconds until then; None where unknown.
    `elapsed` is the time since the present attempt began.
    """

    step: int
    position: int
    goal: int | None = None
    epoch_size: int | None = None
    left: float | None = None
    elapsed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """Values in the order of the steps, of equal numbers of them each; NaN where there is none.

    `weights` is what each counts in a mean of several: the seconds of a rate, so that the mean is
    samples over time. All count the same if it is empty.
    """

    first: int
    last: int
    values: tuple[float, ...]
    weights: tuple[float, ...] = ()
    now: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """What one rank did of late: mean seconds of a step by part, and its memory in bytes."""

    number: int
    host: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None

    @property
    def seconds(self) -> float:
        """A step's wall time."""
        return sum(self.parts.values())

    @property
    def own(self) -> float:
        """What it would take if it never waited for another rank."""
        return self.seconds - self.parts.get("waiting", 0.0)


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """The rank that others wait for: in which part, for how many seconds a step, since which step."""

    rank: int
    part: str
    excess: float
    host: str = ""
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """The last checkpoint and the next; `due` is in so many seconds, negative when it is late."""

    step: int | None = None
    ago: float = 0.0
    seconds: float = 0.0
    blocked: float = 0.0
    next_step: int | None = None
    due: float | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often the run was started again, and what ended the attempt before."""

    count: int = 0
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment. `window` is how many steps the ranks' times are a mean of."""

    run: str
    clock: str
    state: RunStatus
    verdict: str = ""
    size: int = 0
    progress: RunProgress | None = None
    loss: MetricCurve | None = None
    throughput: MetricCurve | None = None
    ranks: tuple[RankStats, ...] = ()
    missing: tuple[int, ...] = ()
    window: int = 0
    device_memory: bool = False
    slowest: Slowest | None = None
    saves: CheckpointStatus = CheckpointStatus()
    restarts: Restarts = Restarts()
