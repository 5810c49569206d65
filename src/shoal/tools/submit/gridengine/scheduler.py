"""Grid Engine: the implementation of the contract of schedulers, and the options of qsub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar

from shoal.tools.submit.batch_script import BatchScheduler
from shoal.tools.submit.commands import SchedulerCommands
from shoal.tools.submit.gridengine import site_draft
from shoal.tools.submit.gridengine.queue import parse_attributes, parse_queue
from shoal.tools.submit.qsub.options import given_options, qsub_name, qsub_word, refuse_options
from shoal.tools.submit.scheduler import (
    BATCH_KEYS,
    Job,
    QueuedJob,
    SchedulerProfile,
    checked,
    mpirun_command,
)
from shoal.util.errors import LaunchError

_COMMANDS = SchedulerCommands(
    title="Grid Engine",
    submit="qsub",
    ping="qstat",
    unreached=re.compile(
        r"unable to (contact|send message to) qmaster|act_qmaster|commlib error", re.IGNORECASE
    ),
    unknown=re.compile(r"^denied: job \S+ does not exist|is already in deletion"),
)


def options(job: Job, folder: str) -> Iterator[str]:
    """Yield options for qsub, which splits a line at spaces outside of quotes."""
    refuse_options("Grid Engine", qos=job.qos, mem=job.memory)
    yield "-S /bin/bash"
    yield "-V"
    yield "-cwd"
    yield f"-N {qsub_name(job.name)}"
    yield f"-o {qsub_word('--run', f'{folder}/log.txt')}"
    yield "-j y"
    yield "-notify"
    yield f"-r {'y' if job.requeue else 'n'}"
    yield f"-l h_rt={job.time}"
    if job.gpus:
        yield f"-l {qsub_word('gpu_resource', job.gpu_resource or 'gpu')}={job.gpus}"
    if job.constraint is not None:
        what = "a resource, as in ib or gpu_type=a100"
        checked("Grid Engine", "--constraint", job.constraint, r"\S+", what)
        yield f"-l {qsub_word('--constraint', job.constraint)}"
    for option, given, value in (
        ("-q", "--partition", job.partition),
        ("-P", "--account", job.account),
    ):
        if value is not None:
            yield f"{option} {qsub_word(given, value)}"
    yield from _environment(job)
    if job.elements:
        yield f"-t 1-{job.elements}"
        if job.at_once is not None:
            yield f"-tc {job.at_once}"
    yield from given_options(job, "-l hostname=node01")


def slots_on_node(job: Job) -> int:
    """Return the slots of a job on each node: one for each core, or for each process."""
    return job.per_node * (job.cpus or 1)


def _environment(job: Job) -> Iterator[str]:
    """Yield the option for the slots of a job, unless it has only one."""
    slots = job.nodes * slots_on_node(job)
    if slots == 1:
        return
    if not job.parallel_environment:
        raise LaunchError(
            given=f"{slots} slots: {job.nodes} node(s), {slots_on_node(job)} on each",
            found="the site's file names no parallel environment for this queue",
            fix='add parallel_environment = "NAME" to it; `qconf -spl` lists the names',
        )
    yield f"-pe {qsub_word('parallel_environment', job.parallel_environment)} {slots}"


class GridEngine(BatchScheduler):
    """Grid Engine, by its commands."""

    # A job's own script sends the signal before the time limit, which counts from a little earlier.
    profile = SchedulerProfile(
        title="Grid Engine",
        submit_program="qsub",
        own_program="qconf",
        launchers=("mpirun",),
        signal_delay=5,
        site_keys=(*BATCH_KEYS, "parallel_environment"),
    )
    shell: ClassVar[Mapping[str, str]] = {
        "job_id": "$JOB_ID",
        "job_number": "JOB_ID",
        "element": '$([ "$SGE_TASK_ID" = undefined ] || echo $((SGE_TASK_ID - 1)))',
        "queue_id": "$JOB_ID${task:+.$SGE_TASK_ID}",
        "restarts": "$RESTARTED",
        "nodes": "$nodes",
        "first_node": "$HOSTNAME",
        "rank": "0",
        "local": "/tmp",
        "each_node": "each_node",
        "broadcast": "broadcast",
        "cancel": "qdel",
        "requeue": "requeue",
        # A d in the state of a job means that it is being deleted.
        "may_requeue": 'qstat -s r | awk -v job="$JOB_ID" -v task="$SGE_TASK_ID" '
        """'$1 == job && $5 ~ /d/ && (task == "undefined" || $NF == task) { exit 1 }'""",
        "programs": "mpirun|mpirun.openmpi|qrsh",
    }

    @property
    def template(self) -> str:
        """The blocks of the batch script for logs, the time limit and lost nodes."""
        return resources.files(__package__).joinpath("job.sh.jinja").read_text()

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        """Yield the lines that qsub reads."""
        return (f"#$ {option}" for option in options(job, folder))

    def launch_command(self, job: Job, *, step: bool) -> str:
        """Return mpirun, which finds the nodes in PE_HOSTFILE and reaches them by qrsh."""
        return mpirun_command(job)

    def check_available(self) -> None:
        """Raise LaunchError if qmaster does not answer."""
        _COMMANDS.run(["qstat"])

    def check_queue(self, job: Job) -> None:
        """Raise LaunchError if the parallel environment places the slots on other nodes."""
        if job.parallel_environment is None or job.nodes * slots_on_node(job) == 1:
            return
        said = _COMMANDS.run(["qconf", "-sp", job.parallel_environment])
        rule = parse_attributes(said).get("allocation_rule")
        wanted = [str(slots_on_node(job)), *(["$pe_slots"] if job.nodes == 1 else [])]
        if rule is not None and rule not in wanted:
            raise LaunchError(
                given=f"{job.nodes} node(s) with {slots_on_node(job)} slots each",
                found=f"the parallel environment {job.parallel_environment} has the allocation rule "
                f"{rule}, which does not give these nodes",
                fix=f"use one with the rule {' or '.join(wanted)}: `qconf -spl` lists them (--force "
                "submits it anyway)",
            )

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a batch script with qsub, which rejects it if it could never run."""
        order = [] if after is None else ["-hold_jid", after]
        printed = _COMMANDS.run(["qsub", "-terse", "-w", "e", *order, str(script)])
        # Of an array, it prints the elements after the number.
        return _COMMANDS.find_job(printed, r"^(\d+)(?:\.\S+)?$")

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return the jobs that qstat lists, which are those that have not ended."""
        found = parse_queue(_COMMANDS.run(["qstat", "-u", "*", "-g", "d"]))
        return [each for each in found if each.job.partition(".")[0] in jobs]

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs by qdel, which gives them the time to save that their queue has as `notify`."""
        _COMMANDS.run(["qdel", *jobs], known=False)

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """The same: qdel sends SIGUSR2 first."""
        self.cancel(jobs)

    def draft_site(self, name: str) -> str:
        """Draft a site file from qstat and qconf."""
        queues = _COMMANDS.run(["qconf", "-sql"]).split()
        texts = {queue: _COMMANDS.run(["qconf", "-sq", queue]) for queue in queues}
        return site_draft.draft_text(name, _COMMANDS.run(["qstat", "-f"]), texts)
