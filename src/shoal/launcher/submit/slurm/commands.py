"""Slurm's commands: run, and what they say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.distributed import env_vars
from shoal.util.errors import LaunchError

_SECONDS = 60.0
# What Slurm's commands say on a machine that has them and belongs to no cluster, or gets no answer.
_UNREACHED = re.compile("configuration source|unable to contact slurm|DNS SRV", re.IGNORECASE)
_UNKNOWN = re.compile("invalid job id", re.IGNORECASE)
_NUMBER = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED"}
_ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}


# Reasons, by prefix, for which a pending job never starts, and what to do about them
# ("Job reason codes" of squeue(1)).
_NEVER = {
    "DependencyNeverSatisfied": "its dependency can't be satisfied: the other job ended differently",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows, or fewer than it requires",
    "PartitionConfig": "its partition does not have the resources that it asks for",
    "ReqNodeNotAvail": "the nodes that it asks for are down, drained or reserved beyond its end",
    "BadConstraints": "no node has the resources that it asks for",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QoS may not use this partition",
    "InvalidAccount": "its account is not valid any more",
    "InvalidQOS": "its QoS is not valid any more",
    "JobHeldAdmin": "an administrator holds it: ask them",
    "JobHeldUser": "it is held: scontrol release JOB",
    "QOSMax": "it asks for more than its QoS gives one job",
    "AssocMax": "it asks for more than its account gives one job",
    "QOSMin": "it asks for less than its QoS requires",
}
# Limits of all jobs together, not of one, have the same prefixes and resolve by themselves.
_TOGETHER = re.compile(r"^(QOS|Assoc)(Max|Grp)\w*(PerUser|PerAccount|Submit|JobsLimit|JobsPer)")


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A job, or an element of an array, that Slurm knows of."""

    job: str
    state: str
    ran: str
    limit: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state in _ENDED

    @property
    def never(self) -> str:
        """Why it can never start, as far as Slurm's reason says; else empty."""
        code = self.reason.strip("()")
        if self.state != "PENDING" or _TOGETHER.match(code):
            return ""
        return next((why for start, why in _NEVER.items() if code.startswith(start)), "")


def require() -> None:
    """Raises LaunchError where there is no sbatch."""
    run(["sbatch", "--version"])


def submit(script: Path, *, after: str | None = None) -> str:
    """Hand a batch script to sbatch; the number of the job. It starts when job `after` has ended."""
    order = [] if after is None else [f"--dependency=afterany:{after}"]
    said = run(["sbatch", "--parsable", *order, str(script)])
    found = _NUMBER.findall(said)
    if not found:
        raise LaunchError(
            given="sbatch --parsable",
            found=f"it succeeded, but printed no number of a job: {said.strip()[:200]!r}",
            fix="look for the job by `squeue --me` and cancel it: its files have been taken away",
        )
    return str(found[-1])  # centres' own sbatch may print more before it


def queued(jobs: Sequence[str]) -> list[Queued]:
    """Those of the jobs, and of their elements, that Slurm knows: for some minutes after their end."""
    form = ["--noheader", "--array", "--states=all", "--format=%i|%T|%M|%l|%R"]
    found = []
    for job in jobs:
        # Of several at once, one that is unknown makes squeue say nothing of the others.
        text = run(["squeue", f"--jobs={job}", *form], known=False)
        for line in text.splitlines():
            parts = line.split("|", 4)
            if len(parts) == 5:
                name, state, ran, limit, reason = parts
                found.append(Queued(job=name, state=state, ran=ran, limit=limit, reason=reason))
    return found


def cancel(jobs: Sequence[str], *options: str) -> None:
    """scancel, quiet about jobs that have ended."""
    run(["scancel", "--quiet", *options, *jobs], known=False)


def run(command: Sequence[str], *, known: bool = True) -> str:
    """What a command of Slurm's prints.

    Raises LaunchError where it is missing, reaches no cluster, or fails; but not for a job that Slurm
    does not know, or not any more, where it need not be `known`.
    """
    to_submit = command[0] == "sbatch"
    elsewhere = "; `--dry-run` needs none" if to_submit else ""
    try:
        done = subprocess.run(
            command,
            env=env_vars.outside_of_jobs(),
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
    if done.returncode and (known or not _is_unknown(done.stderr)):
        shown = "; `--dry-run` shows the batch script" if to_submit else ""
        raise LaunchError(
            given=" ".join(command),
            found=done.stderr.strip() or f"exit code {done.returncode}",
            fix=f"change what Slurm objects to{shown}",
        )
    return done.stdout


def _is_unknown(said: str) -> bool:
    """Whether all that a command complains of are jobs that Slurm does not know."""
    return all(_UNKNOWN.search(line) for line in said.strip().splitlines())
