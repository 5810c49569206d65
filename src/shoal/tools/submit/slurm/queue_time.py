"""When Slurm would start a job, and how long earlier jobs waited."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from datetime import datetime

from shoal.tools.submit.slurm.commands import run_command
from shoal.util.errors import LaunchError

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
