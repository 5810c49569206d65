"""The latest checkpoint of a run, and an estimate of the next one from the events."""

from __future__ import annotations

from itertools import pairwise

from shoal.tools.report import Attempt, Event, History
from shoal.tools.report.dashboard.snapshot import CheckpointStatus
from shoal.tools.report.history import integer_in, number_in, text_in


def checkpoint_status(
    history: History, attempt: Attempt, *, step: int, seconds: float, now: float
) -> CheckpointStatus:
    """Return the last save of all attempts, and the next, estimated from this attempt's saves.

    `step` is the current step and `seconds` the time of one. If the saves were the same number of steps
    apart, the next is expected after the same number; otherwise after the time between the last two.
    """
    told = [found for each in history.attempts for found in _saves(each)]
    last_step, last_time, took, blocked = told[-1] if told else (None, now, 0.0, 0.0)
    next_step, due = _next(attempt, step, seconds, now)
    return CheckpointStatus(
        step=last_step,
        ago=max(0.0, now - last_time),
        seconds=took,
        blocked=blocked,
        next_step=next_step,
        due=due,
        failed=_failed(attempt, after=last_time if told else 0.0),
    )


SaveRecord = tuple[int, float, float, float]
"""The step, the time of completion, the seconds that the save took, and those that it blocked."""


def _saves(attempt: Attempt) -> list[SaveRecord]:
    """Return the saves as recorded by one rank, the lowest that recorded any."""
    told = attempt.said("save")
    teller = min((rank for rank, _ in told), default=0)
    found = []
    for rank, event in told:
        step, time = integer_in(event, "step"), number_in(event, "t")
        if rank == teller and step is not None and time is not None and _is_regular(event):
            took, blocked = number_in(event, "seconds") or 0.0, number_in(event, "blocked") or 0.0
            found.append((step, time, took, blocked))
    return found


def _is_regular(event: Event) -> bool:
    """Return whether the run would resume from it, unlike from a checkpoint in `best/` and the like."""
    folders = text_in(event, "path").split("/")
    return len(folders) < 2 or folders[-2] == "checkpoints"


def _next(attempt: Attempt, step: int, seconds: float, now: float) -> tuple[int | None, float | None]:
    """Return the step of the next save, and the seconds until then."""
    found = _saves(attempt)
    steps = [save[0] for save in found]
    if attempt.first <= 1:
        steps.insert(0, 0)  # the very first save defines the distance
    spans = [after - before for before, after in pairwise(steps)][-2:]
    if not spans or not found:
        return None, None
    if spans[0] == spans[-1] > 0:
        at = steps[-1] + spans[-1]
        return at, (at - step) * seconds
    if len(found) < 2:
        return None, None
    return None, found[-1][1] + (found[-1][1] - found[-2][1]) - now


def _failed(attempt: Attempt, *, after: float) -> str:
    """Return the error of the last save, if it failed."""
    for _, event in reversed(attempt.said("save_failed")):
        time, step = number_in(event, "t"), integer_in(event, "step")
        if time is not None and time > after:
            return f"at step {step:,}: {text_in(event, 'error')}" if step is not None else "once"
    return ""
