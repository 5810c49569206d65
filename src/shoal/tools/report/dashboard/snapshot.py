"""The state of a run at one moment, as plain values for the page."""

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
"""`reading`: the events have not been read yet. `absent`: the run does not exist yet. `silent`: the run
has not recorded an event for long."""

OVER: tuple[Kind, ...] = ("ended", "preempted", "interrupted", "failed")
"""The statuses of a run that has recorded its end."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run, the seconds since it changed, and the reason."""

    kind: Kind
    since: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress of a run: positions and sizes in samples.

    `goal` is the position at which it ends, `left` the seconds until then; None if unknown. `elapsed`
    is the time since the current attempt began.
    """

    step: int
    position: int
    goal: int | None = None
    epoch_size: int | None = None
    left: float | None = None
    elapsed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MetricCurve:
    """Values in the order of the steps, for equal numbers of steps each; NaN if there is none.

    `weights` are the weights in a mean of several values: the seconds of a rate, so that the mean is
    samples over time. All weights are equal if it is empty.
    """

    first: int
    last: int
    values: tuple[float, ...]
    weights: tuple[float, ...] = ()
    now: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """Recent values of one rank: mean seconds of a step by part, and its memory in bytes."""

    number: int
    host: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None

    @property
    def seconds(self) -> float:
        """The wall time of a step."""
        return sum(self.parts.values())

    @property
    def own(self) -> float:
        """The time of a step without waits for other ranks."""
        return self.seconds - self.parts.get("waiting", 0.0)


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """The rank that others wait for: its slow part, the excess in seconds per step, the first step."""

    rank: int
    part: str
    excess: float
    host: str = ""
    since: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """The latest checkpoint and the next one; `due` is in seconds from now, negative if it is late."""

    step: int | None = None
    ago: float = 0.0
    seconds: float = 0.0
    blocked: float = 0.0
    next_step: int | None = None
    due: float | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """The number of restarts, and the end of the previous attempt."""

    count: int = 0
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment. `window` is the number of steps over which the ranks' times are averaged."""

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
