"""How attempts of a run ended, from what their ranks said last."""

from __future__ import annotations

from shoal.report import Attempt, Event, History
from shoal.report.dashboard.snapshot import Kind, Restarts, RunStatus

ASKED: dict[str, Kind] = {
    "preempted": "preempted",
    "interrupted": "interrupted",
    "failed": "failed",
}
"""Events of a run that was asked to stop, or had to; what follows them is only the end of that."""


def number(event: Event, name: str) -> float | None:
    """A field that should be a number, if it is one."""
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return None
    return float(value)


def whole(event: Event, name: str) -> int | None:
    """A field that should be a whole number, if it is one."""
    value = event.get(name)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def text(event: Event, name: str) -> str:
    """A field that should be a text; not more of it than a line."""
    value = event.get(name)
    return value[:500] if isinstance(value, str) else ""


def fate(attempt: Attempt, *, now: float) -> RunStatus | None:
    """How an attempt ended; None while nothing says that it has."""
    for _, event in attempt.events:
        kind = ASKED.get(event["event"])
        if kind is not None:
            return RunStatus(kind=kind, since=_since(event, now), reason=_asked(event))
    closed = None
    for rank, event in attempt.said("end"):
        if event.get("reason") == "error":
            error = text(event, "error") or "an error"
            return RunStatus(
                kind="failed", since=_since(event, now), reason=_at(attempt, rank, error, event)
            )
        if rank == min(attempt.ranks, default=rank):
            closed = RunStatus(kind="ended", since=_since(event, now), reason=_closed(event))
    return closed


def restarts(history: History) -> Restarts:
    """How often it was started again, and why last."""
    attempts = history.attempts
    if len(attempts) < 2:
        return Restarts()
    before = attempts[-2]
    ended = fate(before, now=before.seen)
    if ended is None:
        last = f"the attempt before fell silent after step {before.last:,}, as if killed"
    else:
        last = f"the attempt before {'was ' * (ended.kind in _PASSIVE)}{ended.kind}"
        last += f": {ended.reason}" if ended.reason else ""
    return Restarts(count=len(attempts) - 1, last=last)


_PASSIVE = ("preempted", "interrupted")


def _since(event: Event, now: float) -> float:
    time = number(event, "t")
    return max(0.0, now - time) if time is not None else 0.0


def _asked(event: Event) -> str:
    by, on, step = text(event, "by"), whole(event, "on"), whole(event, "step")
    words = [f"by {by}"] if by else []
    words += [f"on rank {on}"] if on is not None else []
    words += [f"after step {step:,}"] if step is not None else []
    return " ".join(words)


def _closed(event: Event) -> str:
    step = whole(event, "step")
    return f"after step {step:,}" if step is not None else ""


def _at(attempt: Attempt, rank: int, error: str, event: Event) -> str:
    step = whole(event, "step")
    return f"{error} on {attempt.place(rank)}" + (f", after step {step:,}" if step is not None else "")
