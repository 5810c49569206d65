"""PBS Professional and OpenPBS: the implementation of the contract of schedulers, options of qsub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar

from shoal.tools.submit.batch_script import BatchScheduler
from shoal.tools.submit.commands import SchedulerCommands
from shoal.tools.submit.pbs.text_output import draft_text, parse_objects, parse_queue, queue_limits
from shoal.tools.submit.qsub.options import given_options, qsub_name, qsub_word, refuse_options
from shoal.tools.submit.scheduler import (
    Job,
    QueuedJob,
    SchedulerProfile,
    check_limits,
    checked,
    mpirun_command,
)
from shoal.tools.submit.times import spell_time

_COMMANDS = SchedulerCommands(
    title="PBS",
    submit="qsub",
    ping="qstat -B",
    unreached=re.compile(r"cannot connect to server|No default server", re.IGNORECASE),
    unknown=re.compile(r"unknown job|job has finished", re.IGNORECASE),
)


def options(job: Job, folder: str) -> Iterator[str]:
    """Yield options for qsub, which splits a line at spaces outside of quotes."""
    refuse_options("PBS", qos=job.qos)
    yield "-S /bin/bash"
    yield "-V"
    yield f"-N {qsub_name(job.name)}"
    # A directory gets a file for each job: the output before the batch script opens its log.
    yield f"-o {qsub_word('--run', f'{folder}/')}"
    yield "-j oe"
    yield f"-r {'y' if job.requeue or job.elements else 'n'}"
    yield f"-l select={job.nodes}:{':'.join(_chunk(job))}"
    if job.nodes > 1:
        yield "-l place=scatter"
    yield f"-l walltime={spell_time(job.time)}"
    for option, given, value in (
        ("-q", "--partition", job.partition),
        ("-A", "--account", job.account),
    ):
        if value is not None:
            yield f"{option} {qsub_word(given, value)}"
    if job.elements:
        # PBS takes no range from 0 to 0.
        last = f"{job.elements - 1}" if job.elements > 1 else "1:2"
        yield f"-J 0-{last}" + ("" if job.at_once is None else f"%{job.at_once}")
    yield from given_options(job, "-l filesystems=home")


def _chunk(job: Job) -> Iterator[str]:
    """Yield the resources of a node."""
    yield f"ncpus={job.per_node * (job.cpus or 1)}"
    yield f"mpiprocs={job.per_node}"
    if job.gpus:
        yield f"{qsub_word('gpu_resource', job.gpu_resource or 'ngpus')}={job.gpus}"
    if job.memory is not None:
        size = r"\d+[kmgtpKMGTP]?[bwBW]?"
        yield f"mem={checked('PBS', '--mem', job.memory, size, 'a size, as in 64gb')}"
    if job.constraint is not None:
        what, one = "resources, as in gputype=A100:ib=True", r"[^\s:=]+=[^\s:]+"
        checked("PBS", "--constraint", job.constraint, f"{one}(:{one})*", what)
        yield qsub_word("--constraint", job.constraint, allowed=":")


class PBS(BatchScheduler):
    """PBS Professional and OpenPBS, by their commands."""

    # A job's own script sends the signal before the time limit, and looks for it every 5 s.
    profile = SchedulerProfile(
        title="PBS",
        submit_program="qsub",
        own_program="pbsnodes",
        launchers=("mpirun",),
        signal_delay=10,
    )
    shell: ClassVar[Mapping[str, str]] = {
        "job_id": "$PBS_JOBID",
        "job_number": "${PBS_JOBID%%[^0-9]*}",
        "element": "${PBS_ARRAY_INDEX:-}",
        "queue_id": "$PBS_JOBID",
        "restarts": "$RESTARTED",
        "nodes": "$nodes",
        "first_node": "${nodes%% *}",
        "rank": "${PALS_RANKID:-0}",
        "local": "/tmp",
        "each_node": "each_node",
        "broadcast": "broadcast",
        "cancel": "qdel",
        "requeue": "requeue",
        "may_requeue": "may_requeue",
        # PALS begins its messages with the name of a Cray node.
        "programs": "mpirun|mpiexec|prterun|x[0-9]+c[0-9]+s[0-9]+b[0-9]+n[0-9]+[^ :]*",
    }

    @property
    def template(self) -> str:
        """The parts of the batch script for logs, requeue and signals."""
        return resources.files(__package__).joinpath("job.sh.jinja").read_text()

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        """Yield the lines that qsub reads."""
        return (f"#PBS {option}" for option in options(job, folder))

    def launch_command(self, job: Job, *, step: bool) -> str:
        """Return the site's launcher of MPI, which finds the nodes in PBS_NODEFILE or asks PBS."""
        return mpirun_command(job)

    def check_available(self) -> None:
        """Raise LaunchError if the server does not answer."""
        _COMMANDS.run(["qstat", "-B"])

    def check_queue(self, job: Job) -> None:
        """Raise LaunchError if there is no such queue, or for more time or nodes than it allows."""
        if job.partition is None:
            return
        said = _COMMANDS.run(["qstat", "-Qf", job.partition])
        for queue in parse_objects(said, "Queue: ").values():
            time, nodes = queue_limits(queue)
            check_limits(job, time=time, nodes=nodes)

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a batch script with qsub."""
        order = [] if after is None else ["-W", f"depend=afterany:{after}"]
        printed = _COMMANDS.run(["qsub", *order, str(script)])
        return _COMMANDS.find_job(printed, r"^(\d+(?:\[\])?(?:\.\S+)?)$")

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return the jobs that qstat lists, which are those that have not ended."""
        texts = [_COMMANDS.run(["qstat", "-f", "-t", job], known=False) for job in jobs]
        return [found for text in texts for found in parse_queue(text)]

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs by qdel: SIGTERM, and SIGKILL after the job's kill_delay."""
        if jobs:
            _COMMANDS.run(["qdel", *jobs], known=False)

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """Cancel the jobs that wait. The others look for the mark of `shoal cancel`.

        qsig would also signal the shell in which PBS has started the batch script, and end the job.
        """
        self.cancel([each.job for each in self.queued(jobs) if each.phase == "waiting"])

    def draft_site(self, name: str) -> str:
        """Draft a site file from qstat and pbsnodes."""
        queues = _COMMANDS.run(["qstat", "-Qf"])
        return draft_text(name, queues, _COMMANDS.run(["pbsnodes", "-a"]))
