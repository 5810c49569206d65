"""A scheduler's commands as small scripts that record their calls, and batch scripts run by bash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from shoal.tools.submit.decide import decide
from shoal.tools.submit.scheduler import JobContext, JobRequest
from shoal.tools.submit.site_catalog import Site, site_scheduler

_FAKE = """#!/bin/bash
printf '%s\\0' "{name}" "$@" >> "{folder}/calls"
[ -e "{folder}/{name}.err" ] && cat "{folder}/{name}.err" >&2
[ -e "{folder}/{name}.out" ] && cat "{folder}/{name}.out"
exit "$(cat "{folder}/{name}.code" 2>/dev/null || echo 0)"
"""

PLAIN = Site(name="plain")
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo", "mpirun", "sbcast")


class Fakes:
    """A directory of such commands: set what they print and exit with, and get their calls."""

    def __init__(self, folder: Path, commands: Sequence[str] = COMMANDS) -> None:
        self.folder = folder
        self.commands = commands
        self.path = folder / "bin"
        self.path.mkdir(parents=True)
        for name in commands:
            program = self.path / name
            program.write_text(_FAKE.format(name=name, folder=folder))
            program.chmod(0o755)

    def set(self, name: str, *, code: int = 0, out: str = "", err: str = "") -> None:
        (self.folder / f"{name}.code").write_text(str(code))
        (self.folder / f"{name}.out").write_text(out)
        (self.folder / f"{name}.err").write_text(err)

    def calls(self, name: str | None = None) -> list[list[str]]:
        """The commands that were called, each with its words; of one command if it is named."""
        path = self.folder / "calls"
        text = path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
        found: list[list[str]] = []
        for word in text.split("\0")[:-1]:
            if word in self.commands:
                found.append([])
            found[-1].append(word)
        return [call for call in found if name is None or call[0] == name]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}"}


def place(folder: Path | str, **changes: object) -> JobContext:
    """A place whose script is python train.py of a folder."""
    values = {
        "folder": f"{folder}/jobs/1",
        "directory": str(folder),
        "run": str(folder),
        "script": f"{folder}/jobs/1/source/train.py",
        "args": (),
        "sweep": (),
        "python": "python",
        "image": None,
    }
    return JobContext(**{**values, **changes})  # type: ignore[arg-type]


def request(**changes: object) -> JobRequest:
    """A job of an hour."""
    return JobRequest(**{"script": "train.py", "time": 3600, **changes})  # type: ignore[arg-type]


def write(request: JobRequest, site: Site, where: JobContext, *, save: float | None = None) -> str:
    """The batch script of a request."""
    return site_scheduler(site).render(decide(request, site, save=save), where)


def run_script(
    text: str,
    fakes: Fakes,
    variables: Mapping[str, str] | None = None,
    *,
    stdout: int | IO[str] = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a batch script as Slurm would, with the fakes in the place of its commands."""
    return subprocess.run(
        ["bash", "-s"],
        input=text,
        env={**fakes.variables(), "SLURM_JOB_ID": "42", **(variables or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        timeout=100,
        check=False,
    )
