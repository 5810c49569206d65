"""Slurm's commands: run, and what they say."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import environ
from shoal.errors import LaunchError

_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A job, or an element of an array, that Slurm knows of."""

    job: str
    state: str
    ran: str
    limit: str
    reason: str


def submit(script: Path, *, after: str | None = None) -> str:
    """Hand a batch script to sbatch; the number of the job. It starts when job `after` has ended."""
    order = [] if after is None else [f"--dependency=afterany:{after}"]
    said = run(["sbatch", "--parsable", *order, str(script)])
    return said.strip().partition(";")[0]


def queued(jobs: Sequence[str]) -> list[Queued]:
    """Those of the jobs, and of their elements, that have not ended or ended a moment ago."""
    form = ["--noheader", "--array", "--format=%i|%T|%M|%l|%R"]
    found = []
    for job in jobs:
        # Of several at once, one that is unknown makes squeue say nothing of the others.
        text = run(["squeue", f"--jobs={job}", *form], needed=False)
        for line in text.splitlines():
            name, state, ran, limit, reason = line.split("|", 4)
            found.append(Queued(job=name, state=state, ran=ran, limit=limit, reason=reason))
    return found


def cancel(jobs: Sequence[str], *options: str) -> None:
    """scancel, quiet about jobs that have ended."""
    run(["scancel", "--quiet", *options, *jobs], needed=False)


def run(command: Sequence[str], *, needed: bool = True) -> str:
    """What a command of Slurm's prints; LaunchError where it is missing, or fails and is `needed`."""
    try:
        done = subprocess.run(
            command,
            env=environ.outside_of_jobs(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            given=" ".join(command[:2]),
            found=f"there is no {command[0]} on this machine's PATH",
            fix="run this on a login node of the cluster; `shoal submit --dry-run` needs no Slurm",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            given=" ".join(command),
            found=f"no answer within {_SECONDS:.0f} s: Slurm's controller is down or overloaded",
            fix="try again; `scontrol ping` tells whether it answers",
        ) from None
    if done.returncode and needed:
        raise LaunchError(
            given=" ".join(command),
            found=done.stderr.strip() or f"exit code {done.returncode}",
            fix="change what Slurm objects to; `--dry-run` shows the batch script",
        )
    return done.stdout
