"""The submitted jobs of a run: their folders `RUN/jobs/1` and so on, their state and cancellation.

A file lists the runs with jobs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.distributed import env_vars
from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry.stop_time import last_events
from shoal.tools.submit.scheduler import QueuedJob, Scheduler
from shoal.tools.submit.schedulers import find_scheduler
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

RECORD, IDS, ENDS, CANCELLED = "job.json", "jobs", "ends", "cancelled"
_LINES = 2
"""Lines of a report: the exception and the place, with rank and host."""


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A submission: the ids of the jobs, one per job of a chain, their scheduler and request."""

    jobs: tuple[str, ...]
    scheduler: str
    submitted: float
    site: str
    command: str
    nodes: int
    gpus: int
    processes: int
    time: int
    signal: str
    to_batch: bool
    elements: int


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How one start of a job ended: the number of the start, and the exit code."""

    job: str
    restarts: int
    code: int
    when: float


def next_folder(run: Path) -> Path:
    """Return the folder for the next job of a run."""
    return run / "jobs" / str(max(_numbers(run), default=0) + 1)


def make_folder(run: Path) -> Path:
    """Make the folder, for the user only; two simultaneous submissions get one each."""
    while True:
        folder = next_folder(run)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another submission may have made it, or removed the run's folder after an error.
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(mode=0o700)
            return folder


def missing_folders(run: Path) -> list[Path]:
    """Return the parent directories that must be made for a folder, innermost first."""
    jobs = run / "jobs"
    return [folder for folder in (jobs, *jobs.parents) if not folder.exists()]


def remove_folder(folder: Path, made: Sequence[Path]) -> None:
    """Remove a job's folder, and those made for it that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for each in made:
        with suppress(OSError):  # it is not empty
            each.rmdir()


def newest_folder(run: Path) -> Path:
    """Return the folder of the newest submitted job. Raises LaunchError if there is none."""
    for number in sorted(_numbers(run), reverse=True):
        if (run / "jobs" / str(number) / RECORD).is_file():
            return run / "jobs" / str(number)
    if not all(any((run / "jobs" / str(number)).glob("job*")) for number in _numbers(run)):
        raise LaunchError(
            given=str(run),
            found="-o wrote the script, and Shoal did not submit it, so it has no job number",
            fix="follow it with the scheduler's own command",
        )
    raise LaunchError(
        given=str(run),
        found="it contains no job of `shoal submit`",
        fix="pass the directory of --run, or runs/NAME for NAME.py",
    )


def write_record(folder: Path, record: SubmittedJob) -> None:
    """Write the record, with the ids of the jobs in a file that the batch script reads and extends."""
    (folder / IDS).write_text("".join(f"{job}\n" for job in record.jobs))
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")


def read_record(folder: Path) -> SubmittedJob:
    """Return the record of a job. Raises LaunchError if it can't be read."""
    try:
        values = json.loads((folder / RECORD).read_text())
        jobs = (folder / IDS).read_text().split()
        return SubmittedJob(**{**values, "jobs": tuple(jobs)})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            given=str(folder / RECORD),
            found=f"it is not the record of a job: {error}",
            fix="look for the job with the scheduler's own command, or submit again",
        ) from None


def read_ends(folder: Path) -> list[JobEnd]:
    """Return how the jobs of a folder have ended so far, in order."""
    found = []
    with suppress(OSError):
        for line in (folder / ENDS).read_text(errors="replace").splitlines():
            with suppress(ValueError):
                job, restarts, code, when = line.split()
                found.append(JobEnd(job=job, restarts=int(restarts), code=int(code), when=float(when)))
    return found


def read_failure(folder: Path) -> tuple[str, ...]:
    """Return the last lines and the place of the rank that failed first; of an array those of each
    element.
    """
    found: list[str] = []
    for path in sorted(folder.glob("failure*")):
        if path.is_file():
            with suppress(OSError):
                found += path.read_text(errors="replace").rstrip().splitlines()[-_LINES:]
    return tuple(found)


def mark_cancelled(folder: Path) -> None:
    """Mark the jobs as cancelled, so that they do not requeue themselves."""
    (folder / CANCELLED).write_text(f"{CLOCK.wall():.0f}\n")


def logs(folder: Path, elements: Sequence[int]) -> list[Path]:
    """Return the log file of a job, or the log files of an array's elements."""
    return [folder / f"log-{element}.txt" for element in elements] or [folder / "log.txt"]


def _numbers(run: Path) -> list[int]:
    folder = run / "jobs"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isdecimal()]


MOST_RUNS = 50
"""Largest number of runs that are listed, the newest ones."""


def runs_file() -> Path:
    """Return the path of the list of submitted runs, one absolute path per line."""
    return env_vars.state_folder() / "runs"


def add_submitted_run(run: Path) -> None:
    """Append a run; simultaneous submissions do not interfere. Raises OSError."""
    file = runs_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, os.fsencode(f"{run.resolve()}\n"))
    finally:
        os.close(descriptor)


def submitted_runs() -> list[Path]:
    """Return the runs, without duplicates, the last submitted one first."""
    try:
        lines = os.fsdecode(runs_file().read_bytes()).split("\n")
    except OSError:
        return []
    return [Path(line) for line in dict.fromkeys(reversed(lines)) if os.path.isabs(line)]


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


def log_command(run: Path, element: int | None, *, follow: bool) -> list[str]:
    """Return the command that prints the log of the newest submission.

    For an array, it prints one element's log or all logs.
    """
    folder = newest_folder(run)
    record = read_record(folder)
    count = record.elements
    if element is not None and element not in range(count):
        there = f"has elements 0 to {count - 1}" if count else "is not an array"
        raise LaunchError(
            given=f"--element {element}",
            found=f"the latest job of {run} {there}",
            fix="--element 0" if count else "leave --element out",
        )
    files = logs(folder, range(count) if element is None else [element])
    return _scheduler(folder, record).log_command(record.jobs, files, follow=follow)


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
