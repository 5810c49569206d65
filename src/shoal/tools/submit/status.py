"""The state of the submitted jobs of a run, the time that it takes to stop, and their cancellation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry import events
from shoal.tools.submit.job_directory import (
    MOST_RUNS,
    RECORD,
    JobEnd,
    SubmittedJob,
    logs,
    mark_cancelled,
    newest_folder,
    read_ends,
    read_failure,
    read_record,
    runs_file,
    submitted_runs,
)
from shoal.tools.submit.scheduler import QueuedJob, Scheduler
from shoal.tools.submit.schedulers import find_scheduler
from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Status:
    """The newest submission of a run: jobs in the queue, jobs that ended, progress of the training.

    `scheduler` is its name for users. `queued` excludes jobs about which `ends` has more. `step` is the
    last event of a step, `saved` that of a save, as rank 0 recorded them. `failure` has the last lines
    of the report of the rank that failed first, if one did.
    """

    folder: Path
    record: SubmittedJob
    scheduler: str
    queued: tuple[QueuedJob, ...]
    ends: tuple[JobEnd, ...]
    step: dict[str, Any] | None
    saved: dict[str, Any] | None
    failure: tuple[str, ...]


def runs(folder: Path) -> list[Path]:
    """Return the runs that the user has submitted, the newest first, then others in `folder`, by name.

    Runs whose directory has been removed are left out; at most `MOST_RUNS` are returned. Raises
    LaunchError if there is none.
    """
    here = sorted({path.parents[2].resolve() for path in folder.glob(f"*/jobs/*/{RECORD}")})
    submitted = [run for run in submitted_runs() if any(run.glob(f"jobs/*/{RECORD}"))]
    found = list(dict.fromkeys([*submitted, *here]))[:MOST_RUNS]
    if not found:
        raise LaunchError(
            given=f"shoal status in {Path.cwd()}",
            found=f"no run in {folder}/ or in {runs_file()} with a job of `shoal submit`",
            fix="run shoal status RUN with the directory of --run",
        )
    return found


def status(run: Path) -> Status:
    """Return the state of the newest submission of a run.

    Raises LaunchError if there is none, or if the scheduler does not answer.
    """
    folder = newest_folder(run)
    record = read_record(folder)
    last = {event["event"]: event for event in last_events(run)}
    scheduler, ends = _scheduler(folder, record), read_ends(folder)
    known = {end.job for end in ends}
    queued = scheduler.queued(record.jobs)
    return Status(
        folder=folder,
        record=record,
        scheduler=scheduler.profile.title,
        queued=tuple(each for each in queued if each.phase != "ended" or each.job not in known),
        ends=tuple(ends),
        step=last.get("step"),
        saved=last.get("save"),
        failure=read_failure(folder),
    )


def active_jobs(run: Path) -> list[QueuedJob]:
    """Return the waiting and running jobs of the newest submission of a run; none if there was none.

    Raises LaunchError if the scheduler does not answer.
    """
    try:
        folder = newest_folder(run)
        record = read_record(folder)
    except LaunchError:
        return []
    queued = _scheduler(folder, record).queued(record.jobs)
    return [each for each in queued if each.phase != "ended"]


def log_files(run: Path, element: int | None) -> list[Path]:
    """Return the log of the newest submission: for an array, one element's log or all logs."""
    folder = newest_folder(run)
    count = read_record(folder).elements
    if element is not None and element not in range(count):
        there = f"has elements 0 to {count - 1}" if count else "is not an array"
        raise LaunchError(
            given=f"--element {element}",
            found=f"the latest job of {run} {there}",
            fix="--element 0" if count else "leave --element out",
        )
    return logs(folder, range(count) if element is None else [element])


def cancel(run: Path, *, now: bool) -> tuple[SubmittedJob, bool]:
    """End the newest submission of a run: waiting jobs at once, running ones after they have saved.

    With `now`, running jobs don't save. Return the cancelled submission, and whether any of it still
    waited or ran.
    """
    folder = newest_folder(run)
    record = read_record(folder)
    mark_cancelled(folder)
    active = bool(active_jobs(run))
    scheduler = _scheduler(folder, record)
    if now:
        scheduler.cancel(record.jobs)
    else:
        scheduler.cancel_after_save(record.jobs, signal=record.signal, to_batch=record.to_batch)
    return record, active


def outcome(code: int) -> str:
    """Return the meaning of a job's exit code, in words."""
    if code == 0:
        return "finished"
    if code == REQUEUE:
        return "saved, to be resumed"
    return f"failed with {code}" if code < 128 else f"killed by signal {code - 128}"


def _scheduler(folder: Path, record: SubmittedJob) -> Scheduler:
    return find_scheduler(record.scheduler, str(folder / RECORD))


_TAIL = 8 << 20
_STEPS, _SAVES = 200, 5
_PARTS = ("wait", "transfer", "forward", "backward", "communication", "update")


def stopping_seconds(run: Path) -> float | None:
    """Return the seconds of a step and a save, the longest of rank 0's last; None without a save."""
    saves: deque[float] = deque(maxlen=_SAVES)
    steps: deque[float] = deque(maxlen=_STEPS)
    for event in last_events(run):
        if event["event"] == "save":
            saves += _number(event.get("seconds"))
        elif event["event"] == "step":
            steps.append(sum(second for part in _PARTS for second in _number(event.get(part))))
    return None if not saves else max(saves) + max(steps, default=0.0)


def last_events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of rank 0, or the last megabytes of them; none if there is no record."""
    try:
        yield from events.read_events(events.path_of(run, 0), last=_TAIL)
    except OSError:
        return


def _number(value: object) -> list[float]:
    """Return the value if it can be a duration, since the file may come from another user."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return [float(value)] if valid and value >= 0 else []  # type: ignore[arg-type,operator]
