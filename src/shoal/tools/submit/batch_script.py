"""The batch script, rendered by a pure function of a job and its paths."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Protocol

from jinja2 import DictLoader, Environment, StrictUndefined

from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry.events import path_of
from shoal.tools.submit.scheduler import (
    MARK,
    Job,
    JobCommand,
    JobContext,
    SchedulerProfile,
    Shell,
    quote_expression,
    quote_word,
    quote_words,
)
from shoal.util.errors import LaunchError
from shoal.util.python import module_command, script_command

_FIRST_PORT, _PORTS = 10001, 10000
_TEMPLATES = ("job.sh.jinja", "timed_job.sh.jinja")


_KEEPING = (Shell('"$around"'), Shell('"$first"'))


class BatchScheduler(Protocol):
    """A scheduler that takes a batch script: its own parts of it, and what all of them share."""

    @property
    def profile(self) -> SchedulerProfile:
        """Facts about it for messages and decisions."""

    @property
    def shell(self) -> Mapping[str, str]:
        """Shell text of the batch script that differs between schedulers.

        Expressions for a job's environment: `job_id` as `submit` returned it, `job_number` an
        arithmetic expression that differs between jobs, `element` the index in an array or nothing,
        `queue_id` the name that `queued` returns, which may use `$task` for the element, `restarts` the
        number of requeues so far, `nodes` and `first_node` the names of its nodes, `rank` the rank of a
        process, `local` a directory on a disk of the node.

        Commands: `each_node` runs its arguments once on each node, `broadcast` copies a file of the
        first node to all nodes, `cancel` cancels the job whose id follows. `requeue` requeues the job
        `$job`, or sets `$code` to the exit code that does, or submits a new job and appends its id to
        `$folder/jobs`. `may_requeue` succeeds unless a user has ended the job `$job` or the scheduler
        requeues it. `programs`, separated by `|`, write `PROGRAM: message` into the log.
        """

    @property
    def template(self) -> str:
        """Its longer parts of the batch script: a Jinja template that extends `job.sh.jinja`.

        It extends `timed_job.sh.jinja` if the scheduler sends no signal before the time limit.
        """

    def directives(self, job: Job, folder: str) -> Iterator[str]:
        """Yield the lines of the batch script that the scheduler reads, such as `#SBATCH --nodes=2`.

        `folder` is for the logs: `log.txt`, or `log-N.txt` for element N, unless a directive of the
        user names another file. Times are in the scheduler's own format. Raises LaunchError for a value
        that is invalid in such a line.
        """

    def launch_command(self, job: Job, *, step: bool) -> str:
        """Return the command that starts a program once per process of a job.

        With torchrun it starts an agent on each node. A `step` has fewer processes than the job in
        which it runs.
        """

    def render(self, job: Job, place: JobContext) -> str:
        """Return the batch script."""
        return render(self, job, place)

    def log_command(self, jobs: Sequence[str], files: Sequence[Path], *, follow: bool) -> list[str]:
        """Return the command that prints the log files in the job's folder."""
        there = [str(file) for file in files if follow or file.exists()]
        if not there:
            run = shlex.quote(os.path.relpath(files[0].parents[2]))
            raise LaunchError(
                given=f"shoal logs {run} (job {', '.join(jobs)})",
                found=f"no {files[0].name} yet: the job has not started",
                fix=f"run shoal status {run}, or shoal logs -f {run} to wait for it",
            )
        return ["tail", "-n", "+1", *(["-F"] if follow else []), "--", *there]


def render(scheduler: BatchScheduler, job: Job, place: JobContext) -> str:
    """Return the batch script. Each value that a user typed becomes one quoted word.

    Raises LaunchError for a value that is invalid in a line that the scheduler reads.
    """
    shell = {name: Shell(text) for name, text in scheduler.shell.items()}
    bases = {name: resources.files(__package__).joinpath(name).read_text() for name in _TEMPLATES}
    environment = Environment(
        loader=DictLoader({**bases, "scheduler": scheduler.template}),
        finalize=quote_word,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # autoescape is for HTML; quote_word quotes for shells
    )
    # The output of ranks must be in the log at once, and not be lost when they are killed.
    unbuffered = Shell("${PYTHONUNBUFFERED-1}")
    variables: list[tuple[str, str]] = [("PYTHONUNBUFFERED", unbuffered), *place.variables]
    if place.python_path:
        own = shlex.quote(":".join(place.python_path))
        variables.append(("PYTHONPATH", Shell(f"{own}${{PYTHONPATH:+:$PYTHONPATH}}")))
    if job.ports is not None:
        variables.append(("SHOAL_PORTS", Shell(f"${{SHOAL_PORTS:-{job.ports}}}")))
    text = environment.get_template("scheduler").render(
        scheduler=Shell(scheduler.profile.title),
        shell=shell,
        mark=Shell(MARK),
        site=Shell(re.sub(r"\W", "-", job.site)),
        directives=[Shell(line) for line in scheduler.directives(job, place.folder)],
        folder=place.folder,
        directory=place.directory,
        setup=[Shell(line) for line in job.setup],
        variables=[(Shell(name), value) for name, value in variables],
        chain=job.chain,
        requeue=job.requeue,
        requeues=job.requeues,
        requeue_code=REQUEUE,
        restarts=job.restarts,
        launcher=Shell(job.launcher),
        processes=job.processes,
        launch=Shell(scheduler.launch_command(job, step=False)),
        time=job.time,
        lead=job.lead,
        events=str(path_of(place.run, 0)),
        local=quote_expression(job.local or scheduler.shell["local"]),
        stage=[os.path.split(path) for path in place.stage],
        last_exit=quote_words(
            [
                *_container(job, place),
                *module_command("shoal", "last-exit", place.run, python=_staged(place.python, place)),
            ]
        ),
        program=quote_words(_around(_program(job, place, scheduler))),
        turns=[(turn.log, _turn(turn, job, place, scheduler)) for turn in job.turns],
        limit=job.limit,
        sweep=[quote_words(_staged(word, place) for word in words) for words in place.sweep],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _turn(turn: JobCommand, job: Job, place: JobContext, scheduler: BatchScheduler) -> Shell:
    """Return the command of a turn: a step of the job, with as many processes on each node."""
    own = replace(job, processes=turn.processes, per_node=turn.processes // job.nodes)
    place = replace(place, args=(*place.args, *turn.args))
    program = _around(_program(own, place, scheduler))
    return quote_words([Shell(scheduler.launch_command(own, step=True)), *program])


def _around(program: Sequence[str]) -> Sequence[str]:
    """Return the program of each rank, or agent of torchrun, in the shell that keeps its exit code."""
    return ["bash", "-c", *_KEEPING, *program]


def _program(job: Job, place: JobContext, scheduler: BatchScheduler) -> Sequence[str]:
    """Return the words of the command of each rank, or agent of torchrun."""
    words = _container(job, place)
    python = _staged(place.python, place)
    script = [place.script, *(_staged(word, place) for word in place.args)]
    if job.launcher == "torchrun":
        # Jobs that share a node get different ports: they depend on the job number.
        number = scheduler.shell["job_number"]
        port = Shell(f'"$host:$(({_FIRST_PORT} + {number} % {_PORTS}))"')
        sizes = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}", "--rdzv-backend=c10d"]
        # Without the dashes torchrun reads options of the script as abbreviations of its own options.
        meeting = ["--rdzv-id", Shell('"$job"'), "--rdzv-endpoint", port, "--"]
        words += module_command("torch.distributed.run", *sizes, *meeting, *script, python=python)
    else:
        words += script_command(*script, python=python)
    return words


def _container(job: Job, place: JobContext) -> list[str]:
    """Return the words before a command that runs it in the job's container, if there is one."""
    if place.image is None:
        return []
    words = [*job.container_command]
    for path in dict.fromkeys((place.directory, place.folder)):
        words += ["--bind", path]
    words += ["--bind", Shell('"$staged"')] if place.stage else []
    return [*words, place.image]


def _staged(word: str, place: JobContext) -> str:
    """Return a word of the command; staged paths, even as values of options, become the copy's."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.normpath(os.path.join(place.directory, value))
    for whole in place.stage:
        if value and (path == whole or path.startswith(f"{whole}/")):
            within = os.path.relpath(path, os.path.dirname(whole))
            return Shell(
                f'{shlex.quote(option + equals) if option else ""}"$staged"/{shlex.quote(within)}'
            )
    return word
