"""Slurm: the implementation of the contract of schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from shoal.tools.submit.job import Job
from shoal.tools.submit.scheduler import QueuedJob, SchedulerProfile, SchedulerShell
from shoal.tools.submit.slurm import directives, site_draft
from shoal.tools.submit.slurm.commands import run_command
from shoal.tools.submit.slurm.queue import FORMAT, parse_queue
from shoal.util.errors import LaunchError

_NUMBER = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)


class Slurm:
    """Slurm, by its commands."""

    profile = SchedulerProfile(
        title="Slurm",
        submit_program="sbatch",
        launchers=("srun", "torchrun", "mpirun"),
        # Slurm documents a delay of up to one minute; 14 s were measured.
        signal_delay=60,
    )
    shell = SchedulerShell(
        job_id="$SLURM_JOB_ID",
        job_number="SLURM_JOB_ID",
        element="${SLURM_ARRAY_TASK_ID:-}",
        # The last element of an array has the number of the array.
        queue_id="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${task:+_$task}",
        restarts="${SLURM_RESTART_COUNT:-0}",
        nodes="$SLURM_JOB_NODELIST",
        first_node='$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        rank="${SLURM_PROCID:-0}",
        local="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}",
        each_node=(
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
        ),
        broadcast="sbcast --force",
        cancel="scancel --quiet",
        requeue="scontrol requeue",
        may_requeue=(
            "scontrol --oneliner show job \"$job\" | grep -Eq 'JobState=RUNNING|Reason=TimeLimit'"
        ),
        programs="srun|slurmstepd",
    )

    @property
    def template(self) -> str:
        """The blocks of the batch script for srun and for nodes that have died."""
        return resources.files(__package__).joinpath("job.sh.jinja").read_text()

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        """Yield the lines that sbatch reads."""
        return (f"#SBATCH {option}" for option in directives.options(job, folder))

    def launch_command(self, job: Job, *, step: bool) -> str:
        """Return srun with its options."""
        return directives.launch_command(job, step=step)

    def check_available(self) -> None:
        """Raise LaunchError if there is no sbatch."""
        run_command(["sbatch", "--version"])

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a batch script with sbatch and return the job number."""
        order = [] if after is None else [f"--dependency=afterany:{after}"]
        printed = run_command(["sbatch", "--parsable", *order, str(script)])
        found = _NUMBER.findall(printed)
        if not found:
            raise LaunchError(
                given="sbatch --parsable",
                found=f"it succeeded, but printed no job number: {printed.strip()[:200]!r}",
                fix="find the job with `squeue --me` and cancel it, since its files have been removed",
            )
        return str(found[-1])  # a site's wrapper of sbatch may print more before it

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return the jobs that squeue lists, which it does for some minutes after their end."""
        # If one of several jobs is unknown, squeue prints nothing about the others.
        texts = [run_command(["squeue", f"--jobs={job}", *FORMAT], known=False) for job in jobs]
        return [found for text in texts for found in parse_queue(text)]

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs by scancel."""
        self._scancel(jobs)

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """Cancel pending jobs, and signal the tasks or batch scripts of running ones."""
        self._scancel(jobs, "--state=PENDING")
        batch = ["--batch"] if to_batch else []
        self._scancel(jobs, f"--signal={signal}", "--state=RUNNING", *batch)

    def draft_site(self, name: str) -> str:
        """Draft a site file from sinfo and scontrol."""
        return site_draft.draft_text(
            name, run_command(site_draft.SINFO), run_command(site_draft.CONFIG)
        )

    def _scancel(self, jobs: Sequence[str], *options: str) -> None:
        run_command(["scancel", "--quiet", *options, *jobs], known=False)
