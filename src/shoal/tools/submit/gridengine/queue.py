"""The output of Grid Engine's commands: the states of jobs, attributes of queues and environments."""

from __future__ import annotations

import re

from shoal.tools.submit.scheduler import JobPhase, QueuedJob

# Number, priority, name, user, state, time, queue (of jobs that run), slots, number of the element.
_LINE = re.compile(
    r"^ *(\d+) +\S+ +\S+ +\S+ +([A-Za-z]+) +(\S+ \S+) +(?:(\S+@\S+) +)?\d+(?: +(\d+))? *$", re.MULTILINE
)


def parse_queue(text: str) -> list[QueuedJob]:
    """Return the jobs and elements in the output of `qstat -g d`."""
    return [_queued(*found) for found in _LINE.findall(text)]


def parse_attributes(text: str) -> dict[str, str]:
    """Return the attributes in the output of `qconf -sq` or `-sp`, which breaks long lines."""
    return dict(re.findall(r"^(\w+) +(.*?) *$", re.sub(r" *\\\n *", " ", text), re.MULTILINE))


def _queued(job: str, state: str, since: str, queue: str, element: str) -> QueuedJob:
    # qw, hqw and Eqw wait, Rq waits again; r, t and those that are suspended or deleted have begun.
    phase: JobPhase = "waiting" if "q" in state else "running"
    never = f"it failed to start: `qstat -j {job}` has the reason, `qmod -cj {job}` tries again"
    return QueuedJob(
        job=f"{job}.{element}" if element else job,
        phase=phase,
        state=state,
        ran="" if phase == "waiting" else f"since {since}",
        reason=queue,
        never_starts=never if "E" in state else "",
    )
