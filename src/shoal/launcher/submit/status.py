"""Jobs of a run that were submitted: how they are, and how to end them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.launcher.submit import index
from shoal.launcher.submit.job_directory import (
    RECORD,
    JobEnd,
    SubmittedJob,
    logs,
    mark_cancelled,
    newest_folder,
    read_ends,
    read_failure,
    read_record,
)
from shoal.launcher.submit.save_time import last_events
from shoal.launcher.submit.slurm import commands
from shoal.launcher.submit.slurm.commands import Queued
from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Status:
    """The newest submission of a run: what Slurm still knows, how jobs ended, how far training is.

    `queued` leaves out those of which `ends` tell more. `step` is the last event of a step, `saved`
    that of a save, as rank 0 recorded them. `failure` has the last lines of the report of the rank
    that failed first, if the job ended so.
    """

    folder: Path
    record: SubmittedJob
    queued: tuple[Queued, ...]
    ends: tuple[JobEnd, ...]
    step: dict[str, Any] | None
    saved: dict[str, Any] | None
    failure: tuple[str, ...]


def runs(folder: Path) -> list[Path]:
    """The runs that the user has submitted, the newest first, then others in `folder`, by name.

    Those whose directory is gone are left out; at most `index.MOST` are given. Raises LaunchError where
    there is none.
    """
    here = sorted({path.parents[2].resolve() for path in folder.glob(f"*/jobs/*/{RECORD}")})
    submitted = [run for run in index.submitted_runs() if any(run.glob(f"jobs/*/{RECORD}"))]
    found = list(dict.fromkeys([*submitted, *here]))[: index.MOST]
    if not found:
        raise LaunchError(
            given=f"shoal status in {Path.cwd()}",
            found=f"no run in {folder}/ or in {index.path()} with a job of `shoal submit`",
            fix="shoal status RUN with the directory that was named by --run",
        )
    return found


def status(run: Path) -> Status:
    """How the newest submission of a run is. Raises LaunchError where there is none, or no Slurm."""
    folder = newest_folder(run)
    record = read_record(folder)
    last = _last(last_events(run), ("step", "save"))
    queued, ends = commands.queued(record.jobs), read_ends(folder)
    told = {end.job for end in ends}
    return Status(
        folder=folder,
        record=record,
        queued=tuple(each for each in queued if not each.ended or each.job not in told),
        ends=tuple(ends),
        step=last.get("step"),
        saved=last.get("save"),
        failure=read_failure(folder),
    )


def living(run: Path) -> list[Queued]:
    """What of the newest submission of a run waits or runs; nothing where there was none.

    Raises LaunchError where Slurm does not say.
    """
    try:
        record = read_record(newest_folder(run))
    except LaunchError:
        return []
    return [each for each in commands.queued(record.jobs) if not each.ended]


def log_files(run: Path, element: int | None) -> list[Path]:
    """The log of the newest submission; of an array that of one element, or of all."""
    folder = newest_folder(run)
    count = read_record(folder).elements
    if element is not None and element not in range(count):
        there = f"has elements 0 to {count - 1}" if count else "is no array"
        raise LaunchError(
            given=f"--element {element}",
            found=f"the newest job of {run} {there}",
            fix="--element 0" if count else "leave --element out",
        )
    return logs(folder, range(count) if element is None else [element])


def cancel(run: Path, *, now: bool) -> tuple[SubmittedJob, bool]:
    """End the newest submission of a run: what waits at once, what runs after it has saved.

    With `now` all at once, as scancel does it. Returns what was cancelled, and whether any of it still
    waited or ran.
    """
    folder = newest_folder(run)
    record = read_record(folder)
    mark_cancelled(folder)
    lives = bool(living(run))
    if now:
        commands.cancel(record.jobs)
        return record, lives
    commands.cancel(record.jobs, "--state=PENDING")
    told = [f"--signal={record.signal}", "--state=RUNNING"]
    commands.cancel(record.jobs, *told, *(["--batch"] if record.to_batch else []))
    return record, lives


def outcome(code: int) -> str:
    """What an exit code of a job means, in words."""
    if code == 0:
        return "finished"
    if code == REQUEUE:
        return "saved, to go on"
    return f"failed with {code}" if code < 128 else f"killed by signal {code - 128}"


def _last(events: Iterable[dict[str, Any]], kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {event["event"]: event for event in events if event["event"] in kinds}
