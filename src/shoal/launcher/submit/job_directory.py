"""The folders of a run's jobs, `RUN/jobs/1` and on: the script, the source, the log, the record."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.util.errors import LaunchError

SCRIPT, RECORD, IDS, ENDS, CANCELLED = "job.sh", "job.json", "jobs", "ends", "cancelled"
_LINES = 2
"""Of a report: the exception and the place, with rank and host."""


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """What was submitted: the ids of the jobs, one for each of a chain, their scheduler and request."""

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
    """One end of a job: which start of it that was, and its exit code."""

    job: str
    restarts: int
    code: int
    when: float


def next_folder(run: Path) -> Path:
    """The folder that the next job of a run gets."""
    return run / "jobs" / str(max(_numbers(run), default=0) + 1)


def make_folder(run: Path) -> Path:
    """Make it, for nobody else to enter; two who submit at once get one each."""
    while True:
        folder = next_folder(run)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another may have made it, or taken the run's away again with what was refused.
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(mode=0o700)
            return folder


def missing_folders(run: Path) -> list[Path]:
    """What making a folder makes besides, innermost first."""
    jobs = run / "jobs"
    return [folder for folder in (jobs, *jobs.parents) if not folder.exists()]


def remove_folder(folder: Path, made: Sequence[Path]) -> None:
    """Take a job's folder away again, and those made for it that hold nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    for each in made:
        with suppress(OSError):  # it holds something
            each.rmdir()


def newest_folder(run: Path) -> Path:
    """The folder of the newest job that was submitted; LaunchError where there is none."""
    for number in sorted(_numbers(run), reverse=True):
        if (run / "jobs" / str(number) / RECORD).is_file():
            return run / "jobs" / str(number)
    if any(not (run / "jobs" / str(number) / SCRIPT).exists() for number in _numbers(run)):
        raise LaunchError(
            given=str(run),
            found="written by -o and not submitted by Shoal, which knows no number of a job",
            fix="follow it with the scheduler's own command",
        )
    raise LaunchError(
        given=str(run),
        found="no job of `shoal submit` in it",
        fix="give the directory that was named by --run, or runs/NAME for NAME.py",
    )


def write_record(folder: Path, record: SubmittedJob) -> None:
    """Write it, with the numbers of the jobs in a file of their own for the batch script."""
    (folder / IDS).write_text("".join(f"{job}\n" for job in record.jobs))
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")


def read_record(folder: Path) -> SubmittedJob:
    """What was written there; LaunchError where it can't be read."""
    try:
        values = json.loads((folder / RECORD).read_text())
        return SubmittedJob(**{**values, "jobs": tuple(str(job) for job in values["jobs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            given=str(folder / RECORD),
            found=f"not the record of a job: {error}",
            fix="look for the job with the scheduler's own command, or submit again",
        ) from None


def read_ends(folder: Path) -> list[JobEnd]:
    """How the jobs of a folder have ended so far, in order."""
    found = []
    with suppress(OSError):
        for line in (folder / ENDS).read_text(errors="replace").splitlines():
            with suppress(ValueError):
                job, restarts, code, when = line.split()
                found.append(JobEnd(job=job, restarts=int(restarts), code=int(code), when=float(when)))
    return found


def read_failure(folder: Path) -> tuple[str, ...]:
    """What the rank that failed first said last, and where it was; of an array that of each element."""
    found: list[str] = []
    for path in sorted(folder.glob("failure*")):
        if path.is_file():
            with suppress(OSError):
                found += path.read_text(errors="replace").rstrip().splitlines()[-_LINES:]
    return tuple(found)


def mark_cancelled(folder: Path) -> None:
    """From now on its jobs don't go back into the queue."""
    (folder / CANCELLED).write_text(f"{time.time():.0f}\n")


def logs(folder: Path, elements: Sequence[int]) -> list[Path]:
    """The log file of a job, or those of the elements of an array."""
    return [folder / f"log-{element}.txt" for element in elements] or [folder / "log.txt"]


def _numbers(run: Path) -> list[int]:
    folder = run / "jobs"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isdecimal()]
