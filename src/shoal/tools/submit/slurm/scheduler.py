"""Slurm: the implementation of the contract of schedulers, and the options of sbatch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar

from shoal.distributed import env_vars
from shoal.tools.submit.batch_script import BatchScheduler
from shoal.tools.submit.scheduler import (
    BATCH_KEYS,
    Job,
    QueuedJob,
    SchedulerProfile,
    check_limits,
    checked,
    mpirun_command,
    quote_word,
)
from shoal.tools.submit.slurm import site_draft
from shoal.tools.submit.slurm.queue import FORMAT, SLURM, parse_queue, run_command
from shoal.tools.submit.times import spell_time
from shoal.util.errors import LaunchError

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


def options(job: Job, folder: str) -> Iterator[str]:
    """Yield options for sbatch, which splits a line as a shell does, but reads a `$` literally.

    A directive of the user replaces Shoal's own option of the same name.
    """
    lines = (*_own_options(job, folder), *map(_given_option, job.options))
    yield from {re.split("[= ]", line)[0]: line for line in lines}.values()


def _own_options(job: Job, folder: str) -> Iterator[str]:
    """Yield the options of the job itself, then those that Shoal adds to save and requeue it."""
    yield _option("job-name", job.name)
    yield _option("nodes", job.nodes)
    torchrun = job.launcher == "torchrun"
    each = 1 if torchrun else job.per_node
    if not torchrun and job.processes != job.nodes * each:
        yield _option("ntasks", job.processes)
    yield _option("ntasks-per-node", each)
    if job.gpus:
        yield _option("gres", f"{job.gpu_resource or 'gpu'}:{job.gpus}")
    cpus = _cpus_per_task(job)
    if cpus is not None:
        yield _option("cpus-per-task", cpus)
    if not job.multithread:
        yield _option("hint", "nomultithread")
    if job.memory is not None:
        size = r"\d+([KMGT]B?)?|\d+([kmgt]b?)?"
        yield _option("mem", checked("Slurm", "--mem", job.memory, size, "a size, as in 64G"))
    yield _option("time", spell_time(job.time))
    # Slurm replaces patterns that begin with a percent sign; two of them are one.
    log = f"{folder}/log".replace("%", "%%")
    yield _option("output", log + ("-%a.txt" if job.elements else ".txt"))
    if job.constraint is not None:
        what = "features without spaces, as in a100 or 'a100&ib'"
        yield _option("C", checked("Slurm", "--constraint", job.constraint, r"\S+", what))
    for name, value in (
        ("account", job.account),
        ("partition", job.partition),
        ("qos", job.qos),
    ):
        if value is not None:
            yield _option(name, value)
    if job.elements:
        at_once = "" if job.at_once is None else f"%{job.at_once}"
        yield _option("array", f"0-{job.elements - 1}{at_once}")
    if not job.turns:  # turns do not save, and may use all of the time
        yield _option("signal", f"{'B:' if job.to_batch else ''}{job.signal}@{job.lead}")
    yield "--requeue" if job.requeue else "--no-requeue"
    yield "--open-mode=append"


def launch_command(job: Job, *, step: bool) -> str:
    """Return srun with its options for a job, or for a step with fewer processes; or mpirun."""
    if job.launcher == "mpirun":
        return mpirun_command(job)
    # Since Slurm 22.05, srun does not inherit the number of cores. A task that fails ends the others.
    cpus = _cpus_per_task(job)
    command = "srun --kill-on-bad-exit=1" + ("" if cpus is None else f" --cpus-per-task={cpus}")
    if step and job.launcher == "srun":
        command += f" --nodes={job.nodes} --ntasks={job.processes} --ntasks-per-node={job.per_node}"
    return command


def _option(name: str, value: object) -> str:
    text = str(value)
    option = f"-{name} " if len(name) == 1 else f"--{name}="
    if _UNPRINTABLE.search(text) or "\\" in text:
        raise LaunchError(
            given=f"{option}{text!r}",
            found="a control character, or a backslash, which sbatch and shells read differently",
            fix="use --run DIR with a simpler name" if name == "output" else "leave it out",
        )
    return f"{option}{quote_word(text)}"


def _given_option(option: str) -> str:
    found = re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?", option, re.DOTALL)
    if found is None:
        raise LaunchError(
            given=f"--directive {option!r}",
            found="it is not a long option of sbatch",
            fix="write --directive=--exclude=node01, with two dashes and an equals sign",
        )
    return f"--{found[1]}" if found[2] is None else _option(found[1], found[2])


def _cpus_per_task(job: Job) -> int | None:
    if job.cpus is None or job.launcher != "torchrun":
        return job.cpus
    return job.cpus * job.per_node


class Slurm(BatchScheduler):
    """Slurm, by its commands."""

    profile = SchedulerProfile(
        title="Slurm",
        submit_program="sbatch",
        own_program="sbatch",
        launchers=("srun", "torchrun", "mpirun"),
        # Slurm documents a delay of up to one minute; 14 s were measured.
        signal_delay=60,
        site_keys=(*BATCH_KEYS, "multithread", "qos"),
    )
    shell: ClassVar[Mapping[str, str]] = {
        "job_id": "$SLURM_JOB_ID",
        "job_number": "SLURM_JOB_ID",
        "element": "${SLURM_ARRAY_TASK_ID:-}",
        # The last element of an array has the number of the array.
        "queue_id": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${task:+_$task}",
        "restarts": "${SLURM_RESTART_COUNT:-0}",
        "nodes": "$SLURM_JOB_NODELIST",
        "first_node": '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "rank": "${SLURM_PROCID:-0}",
        "local": "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}",
        "each_node": 'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" '
        "--ntasks-per-node=1",
        "broadcast": "sbcast --force",
        "cancel": "scancel --quiet",
        "requeue": 'scontrol requeue "$job"',
        "may_requeue": 'scontrol --oneliner show job "$job" | '
        "grep -Eq 'JobState=RUNNING|Reason=TimeLimit'",
        "programs": "srun|slurmstepd",
    }

    @property
    def template(self) -> str:
        """The blocks of the batch script for srun and for nodes that have died."""
        return resources.files(__package__).joinpath("job.sh.jinja").read_text()

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        """Yield the lines that sbatch reads, and a comment on those that Shoal adds."""
        yield from (f"#SBATCH {option}" for option in options(job, folder))
        if not job.turns:
            yield "# The signal asks ranks to save before the end; the next attempt appends to the log."

    def launch_command(self, job: Job, *, step: bool) -> str:
        """Return srun or mpirun with its options."""
        return launch_command(job, step=step)

    def check_available(self) -> None:
        """Raise LaunchError if there is no sbatch."""
        run_command(["sbatch", "--version"])

    def check_queue(self, job: Job) -> None:
        """Raise LaunchError for more time or nodes than each of its partitions allows.

        With `EnforcePartLimits=NO`, the default, Slurm accepts such a job and never starts it.
        """
        if any(option.startswith("--partition") for option in job.options):
            return
        names = (job.partition or env_vars.variable("SBATCH_PARTITION")).split(",")
        lines = run_command(["scontrol", "--oneliner", "show", "partition"]).splitlines()
        every = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]
        used = [
            each
            for each in every
            if each.get("PartitionName") in names or (names == [""] and each.get("Default") == "YES")
        ]
        times = [site_draft.parse_limit(each.get("MaxTime", "")) or math.inf for each in used]
        counts = [each.get("MaxNodes", "") for each in used]
        nodes = [float(count) if count.isdecimal() else math.inf for count in counts]
        check_limits(job, time=max(times, default=math.inf), nodes=max(nodes, default=math.inf))

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a batch script with sbatch and return the job number."""
        order = [] if after is None else [f"--dependency=afterany:{after}"]
        printed = run_command(["sbatch", "--parsable", *order, str(script)])
        return SLURM.find_job(printed, r"^(\d+)(?:;.*)?$")

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
