"""Parser of squeue's output, and the meaning of its states and reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.tools.submit.scheduler import JobPhase, QueuedJob

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
