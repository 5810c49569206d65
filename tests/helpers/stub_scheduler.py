"""A made-up scheduler, Pool, whose commands are the recording scripts of `fake_slurm`.

It has directives, states and a job id of its own, so that code above the contract of schedulers can't
rely on those of Slurm.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from shoal.tools.submit.batch_script import BatchScheduler
from shoal.tools.submit.scheduler import Job, JobPhase, QueuedJob, SchedulerProfile
from shoal.util.errors import LaunchError

COMMANDS = ("pool-submit", "pool-list", "pool-kill", "pool-again", "pool-run", "pool-copy", "pool-info")
SITE = """
scheduler = "pool"
default = "blue"
[partitions.blue]
cores = 4
nodes = 2
"""


class Pool(BatchScheduler):
    """A scheduler that writes times in minutes and knows jobs as `pool:7`."""

    profile = SchedulerProfile(
        title="Pool",
        submit_program="pool-submit",
        own_program="pool-info",
        launchers=("pool-run", "mpirun"),
        signal_delay=10,
    )
    shell: ClassVar[Mapping[str, str]] = {
        "job_id": "$POOL_ID",
        "job_number": "${POOL_ID#pool:}",
        "element": "${POOL_INDEX:-}",
        "queue_id": "$POOL_ID${task:+/$task}",
        "restarts": "${POOL_STARTS:-0}",
        "nodes": "$POOL_HOSTS",
        "first_node": "${POOL_HOSTS%% *}",
        "rank": "${POOL_RANK:-0}",
        "local": "/tmp",
        "each_node": "pool-run --once",
        "broadcast": "pool-copy",
        "cancel": "pool-kill",
        "requeue": 'pool-again "$job"',
        "may_requeue": 'pool-list "$job" | grep -q active',
        "programs": "pool-run",
    }
    template = '{% extends "job.sh.jinja" %}'

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        yield f"#POOL hosts={job.nodes} cores={job.cpus} minutes={job.time // 60}"
        yield f"#POOL warn={job.signal}:{job.lead} log={folder}/log.txt"
        yield from (f"#POOL {option}" for option in job.options)

    def launch_command(self, job: Job, *, step: bool) -> str:
        return f"pool-run --ranks {job.processes}" + " --part" * step

    def check_available(self) -> None:
        _run("pool-list")

    def check_queue(self, job: Job) -> None:
        """Pool takes its nodes as they are requested."""

    def submit(self, script: Path, *, after: str | None) -> str:
        return _run("pool-submit", *([] if after is None else ["--after", after]), str(script)).strip()

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        found = []
        for line in _run("pool-list", *jobs).splitlines():
            job, state = line.split()
            waits = state == "parked"
            never = "it is parked for good" if waits else ""
            phase: JobPhase = "waiting" if waits else "running"
            found.append(QueuedJob(job=job, phase=phase, state=state, never_starts=never))
        return found

    def cancel(self, jobs: Sequence[str]) -> None:
        _run("pool-kill", *jobs)

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        _run("pool-kill", "--gently", signal, *jobs)

    def draft_site(self, name: str) -> str:
        return f'about = "{_run("pool-info").strip()}"\nscheduler = "pool"\n'


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(
            given=command[0], found=done.stderr.strip(), fix="change what Pool objects to"
        )
    return done.stdout
