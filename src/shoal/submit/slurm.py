"""Slurm's commands: run, and what they say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import environ
from shoal.errors import LaunchError

_SECONDS = 60.0
# What Slurm's commands say on a machine that has them and belongs to no cluster, or gets no answer.
_UNREACHED = re.compile("configuration source|unable to contact slurm|DNS SRV", re.IGNORECASE)


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
    """What a command of Slurm's prints.

    Raises LaunchError where it is missing, reaches no cluster, or fails and is `needed`.
    """
    to_submit = command[0] == "sbatch"
    elsewhere = "; `shoal submit --dry-run` needs none" if to_submit else ""
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
            fix=f"run this on a login node{elsewhere}",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            given=" ".join(command),
            found=f"no answer within {_SECONDS:.0f} s: Slurm's controller is down or overloaded",
            fix="try again; `scontrol ping` tells whether it answers",
        ) from None
    if done.returncode and _UNREACHED.search(done.stderr):
        raise LaunchError(
            given=" ".join(command[:2]),
            found="Slurm is installed here but reaches no cluster",
            fix=f"run this on a login node, where `scontrol ping` is answered{elsewhere}",
        )
    if done.returncode and needed:
        shown = "; `--dry-run` shows the batch script" if to_submit else ""
        raise LaunchError(
            given=" ".join(command),
            found=done.stderr.strip() or f"exit code {done.returncode}",
            fix=f"change what Slurm objects to{shown}",
        )
    return done.stdout
