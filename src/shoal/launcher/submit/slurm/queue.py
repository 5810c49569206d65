"""What squeue prints of jobs, and what its states and reasons mean."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.launcher.submit.scheduler import JobPhase, QueuedJob

FORMAT = ["--noheader", "--array", "--states=all", "--format=%i|%T|%M|%l|%R"]
"""The options of squeue with which it prints what `parse_queue` reads."""

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


def parse_queue(text: str) -> Iterator[QueuedJob]:
    """Yield the jobs in what squeue printed; lines in another form are skipped."""
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
    """Return why a job can never start, as far as Slurm's reason says; empty if it may."""
    code = reason.strip("()")
    if state != "PENDING" or _TOGETHER.match(code):
        return ""
    return next((why for start, why in _NEVER.items() if code.startswith(start)), "")


def _phase(state: str) -> JobPhase:
    if state in _ENDED:
        return "ended"
    return "waiting" if state == "PENDING" else "running"
