"""Slurm's commands and queue: states and reasons of jobs, and when a job would start."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from shoal.tools.submit.commands import SchedulerCommands
from shoal.tools.submit.scheduler import JobPhase, QueuedJob
from shoal.util.errors import LaunchError

SLURM = SchedulerCommands(
    title="Slurm",
    submit="sbatch",
    ping="scontrol ping",
    unreached=re.compile("configuration source|unable to contact slurm|DNS SRV", re.IGNORECASE),
    unknown=re.compile("invalid job id", re.IGNORECASE),
)
"""The commands of Slurm, and their failures."""
run_command = SLURM.run
"""Runs a command of Slurm; see `SchedulerCommands.run`."""

FORMAT = ["--noheader", "--array", "--states=all", "--format=%i|%T|%M|%l|%R"]
"""The options of squeue for output that `parse_queue` reads."""

_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED"}
_ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}

# Reasons, by prefix, for which a pending job never starts, and what to do about them
# ("Job reason codes" of squeue(1)).
_NEVER = {
    "DependencyNeverSatisfied": "its dependency can't be satisfied: the other job ended differently",
    "PartitionTimeLimit": "it requests more time than its partition allows",
    "PartitionNodeLimit": "it requests more nodes than its partition allows, or fewer than it requires",
    "PartitionConfig": "its partition does not have the resources that it requests",
    "ReqNodeNotAvail": "the nodes that it requests are down, drained or reserved beyond its end",
    "BadConstraints": "no node has the resources that it requests",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QoS may not use this partition",
    "InvalidAccount": "its account is no longer valid",
    "InvalidQOS": "its QoS is no longer valid",
    "JobHeldAdmin": "an administrator holds it: contact them",
    "JobHeldUser": "it is held: scontrol release JOB",
    "QOSMax": "it requests more than its QoS allows one job",
    "AssocMax": "it requests more than its account allows one job",
    "QOSMin": "it requests less than its QoS requires",
}
# Limits of all jobs together have the same prefixes, and such jobs start later by themselves.
_TOGETHER = re.compile(r"^(QOS|Assoc)(Max|Grp)\w*(PerUser|PerAccount|Submit|JobsLimit|JobsPer)")


def parse_queue(text: str) -> Iterator[QueuedJob]:
    """Yield the jobs in the output of squeue; lines in another form are skipped."""
    for line in text.splitlines():
        parts = line.split("|", 4)
        if len(parts) == 5:
            name, state, ran, limit, reason = parts
            yield QueuedJob(
                job=name,
                phase=_phase(state),
                state=state,
                ran=ran,
                limit=limit,
                reason=reason,
                never_starts=why_never(state, reason),
            )


def why_never(state: str, reason: str) -> str:
    """Return the reason why a job can never start, by Slurm's reason; empty if it may start."""
    code = reason.strip("()")
    if state != "PENDING" or _TOGETHER.match(code):
        return ""
    return next((why for start, why in _NEVER.items() if code.startswith(start)), "")


def _phase(state: str) -> JobPhase:
    if state in _ENDED:
        return "ended"
    return "waiting" if state == "PENDING" else "running"


_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_HISTORY = ["sacct", "--allusers", "-X", "--noheader", "--parsable2", "--starttime=now-7days"]
_HISTORY += ["--format=Submit,Start,NNodes"]


@dataclass(frozen=True, kw_only=True)
class QueueTime:
    """The seconds in the queue by `sbatch --test-only`, its answer, and the waits of earlier jobs.

    `waits` has the seconds of the jobs of the last week with half to twice as many nodes. It is empty
    if Slurm keeps no accounts.
    """

    seconds: float
    answer: str
    waits: tuple[float, ...]

    @property
    def text(self) -> str:
        """The answer, and the median of the earlier waits."""
        if not self.waits:
            return f"{self.answer}; Slurm has no history of waits"
        minutes = statistics.median(self.waits) / 60
        return f"{self.answer}; the median of {len(self.waits)} earlier waits is {minutes:.0f} min"


def ask_queue_time(nodes: int, per_node: int, gpus: int, *, now: datetime) -> QueueTime:
    """Return when a job of this size would start if it was submitted now.

    Options of sbatch other than the size come from its variables, such as SBATCH_PARTITION and
    SBATCH_TIMELIMIT.

    Raises LaunchError without Slurm, and for a job that it rejects.
    """
    size = [f"--nodes={nodes}", f"--ntasks-per-node={per_node}"]
    size += [f"--gres=gpu:{gpus}"] if gpus else []
    said = run_command(["sbatch", "--test-only", *size, "--wrap=true"], errors=True).strip()
    found = _STARTS.search(said)
    if found is None:
        raise LaunchError(
            given="queue=auto",
            found=f"sbatch --test-only answered without a time: {said[:200]!r}",
            fix="give the hours in the queue, as in queue=2",
        )
    answer = next(line for line in said.splitlines() if found[0] in line)
    seconds = (datetime.fromisoformat(found[1]) - now).total_seconds()
    return QueueTime(seconds=max(0.0, seconds), answer=answer, waits=_waits(nodes))


def _waits(nodes: int) -> tuple[float, ...]:
    try:
        text = run_command(_HISTORY)
    except LaunchError:
        return ()  # without accounting, sacct fails
    found = []
    for line in text.splitlines():
        submitted, started, count = ([*line.split("|"), "", ""])[:3]
        if count.isdecimal() and nodes / 2 <= int(count) <= 2 * nodes and started[:1].isdecimal():
            begin, end = map(datetime.fromisoformat, (submitted, started))
            found.append(max(0.0, (end - begin).total_seconds()))
    return tuple(found)
