"""The directory of a study: its options, its machine, and each result as it arrives.

STUDY/study.json                     the options, the machine, versions
STUDY/jobs/KEY/round-R/              a job: its input, its output, the run directory
STUDY/jobs/KEY/round-R/result.json   its result; a job that succeeded is not run again
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.tools.bench.processor import processor_name
from shoal.tools.bench.scaling.aggregate import Repeat
from shoal.tools.bench.scaling.configurations import (
    Configuration,
    StudyOptions,
    list_configurations,
    round_order,
)
from shoal.util.clock import CLOCK
from shoal.util.document import to_plain
from shoal.util.errors import CheckpointError, raised_as
from shoal.util.packages import versions
from shoal.util.plain import from_plain
from shoal.util.regular_file import open_lock, replace

FORMAT = 1
FILE, LOCK = "study.json", "lock"
_WRITABLE = "use a directory with write permission: --study DIR"
JOBS, RESULT = "jobs", "result.json"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study on disk. `machine` has its hardware and software, as strings, keyed by name."""

    path: Path
    options: StudyOptions
    machine: Mapping[str, str]
    began: float

    @property
    def where(self) -> str:
        """The machine that it runs on, or the site."""
        return self.machine.get("host") or self.machine.get("site") or "?"

    def job(self, configuration: Configuration, number: int) -> Path:
        """Return the directory of a job; rounds count from 0."""
        return self.path / JOBS / configuration.key / f"round-{number}"

    def missing(self, *, failed: bool = False) -> list[tuple[int, Configuration]]:
        """Return the jobs without a result, in the order in which they run; with `failed` also those.

        The cause of a failure may have been fixed. Raises CheckpointError for a file that is not a
        result.
        """
        jobs = list_configurations(self.options)
        return [
            (number, jobs[place])
            for number in range(self.options.rounds)
            for place in round_order(len(jobs), number)
            if not (path := self.job(jobs[place], number) / RESULT).is_file()
            or (failed and _repeat(path).measured is None)
        ]

    def repeats(self) -> list[Repeat]:
        """Return the results so far. Raises CheckpointError for a file that is none."""
        found = []
        for number in range(self.options.rounds):
            for each in list_configurations(self.options):
                path = self.job(each, number) / RESULT
                if path.is_file():
                    found.append(_repeat(path))
        return found

    def keep(self, configuration: Configuration, repeat: Repeat) -> None:
        """Write a result atomically."""
        write_json(self.job(configuration, repeat.round) / RESULT, asdict(repeat))


def begin_study(path: Path, options: StudyOptions, machine: Mapping[str, str] | None = None) -> Study:
    """Return a new study, or continue an existing one with the same options.

    `machine` describes its hardware and software. Default: this machine. Raises CheckpointError with
    the differences if it is another study or has other versions, or if the directory can't be written.
    """
    study = plan_study(path, options, machine)
    if (path / FILE).exists():
        return study
    content = {
        "format": FORMAT,
        "began": study.began,
        "options": to_plain(options),
        "machine": dict(study.machine),
    }
    with raised_as(CheckpointError, given=f"a study in {path}", fix=_WRITABLE):
        write_json(path / FILE, content)
    return study


def forget_study(study: Study) -> None:
    """Remove a study in which no job has started."""
    shutil.rmtree(study.path / JOBS, ignore_errors=True)
    for name in (FILE, LOCK):
        (study.path / name).unlink(missing_ok=True)
    with suppress(OSError):  # the directory has other files
        study.path.rmdir()


def plan_study(path: Path, options: StudyOptions, machine: Mapping[str, str] | None = None) -> Study:
    """Return the study that `begin_study` would start or continue, without writing."""
    machine = this_machine() if machine is None else {**machine, **versions()}
    if not (path / FILE).exists():
        return Study(path=path, options=options, machine=machine, began=CLOCK.wall())
    study = load_study(path)
    _check_same(study, options, machine)
    return study


def load_study(path: Path) -> Study:
    """Return the study in a directory. Raises CheckpointError if there is none."""
    try:
        plain = json.loads((path / FILE).read_text())
        if plain["format"] != FORMAT:
            raise ValueError(f"format {plain['format']}; the supported format is {FORMAT}")
        return Study(
            path=path,
            options=from_plain(StudyOptions, plain["options"]),
            machine={str(name): str(value) for name, value in plain["machine"].items()},
            began=float(plain["began"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            given=f"the study in {path}",
            found=f"{FILE}: {type(error).__name__}: {error}",
            fix="use a directory that `shoal bench scaling … --study DIR` has created",
        ) from None


@contextmanager
def lock_study(study: Study) -> Iterator[None]:
    """Raise CheckpointError if another process is running this study, or if it can't be written."""
    given = f"the study in {study.path}"
    with raised_as(CheckpointError, given=given, fix=_WRITABLE):
        descriptor = open_lock(study.path / LOCK)
    with os.fdopen(descriptor) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                given=given,
                found="it is running already",
                fix="wait for it, or use --study with another directory",
            ) from None
        except OSError:
            pass  # the file system has no locks
        yield


def this_machine() -> dict[str, str]:
    """Return the hardware and software of this machine."""
    return {
        "host": platform.node(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(),
        "processor": processor_name() or platform.processor() or sys.platform,
        **versions(),
    }


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")


def _repeat(path: Path) -> Repeat:
    fix = f"rm {path}, and run the study again: it repeats this job"
    with raised_as(CheckpointError, given=f"the result {path}", fix=fix, errors=(OSError, ValueError)):
        found: Repeat = from_plain(Repeat, json.loads(path.read_text()))
        return found


def _check_same(study: Study, options: StudyOptions, machine: Mapping[str, str]) -> None:
    before, now = to_plain(study.options), to_plain(options)
    differ = [
        f"{name} {before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]
    ]
    differ += [
        f"{name} {study.machine.get(name)}, now {machine.get(name)}"
        for name in ("host", "cores", "site", "a node", "torch", "shoal")
        if study.machine.get(name) != machine.get(name)
    ]
    if differ:
        raise CheckpointError(
            given=f"--study {study.path}",
            found=f"it contains another study: {'; '.join(differ)}",
            fix="use --study with another directory, or pass the same options to continue this study",
        )
