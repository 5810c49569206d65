"""The batch script, rendered by a pure function of a job and its paths."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

from jinja2 import DictLoader, Environment, StrictUndefined

from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry.events import path_of
from shoal.tools.submit.scheduler import (
    Job,
    JobCommand,
    Scheduler,
    Shell,
    quote_expression,
    quote_word,
    quote_words,
)
from shoal.tools.submit.site_catalog import Site, site_scheduler
from shoal.util.python import module_command, script_command

_FIRST_PORT, _PORTS = 10001, 10000
MARK = "# Written by `shoal submit`"
"""The comment by which Shoal recognizes its batch scripts."""

_TEMPLATES = ("job.sh.jinja", "timed_job.sh.jinja")


_KEEPING = (Shell('"$around"'), Shell('"$first"'))


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Where a job runs and what it runs: absolute paths, the command, variables to set.

    `folder` is the job's own, `directory` the one in which the script runs, `run` the run directory.
    Each node gets a copy of the paths in `stage`.
    """

    folder: str
    directory: str
    run: str
    script: str
    args: tuple[str, ...]
    sweep: tuple[tuple[str, ...], ...]
    python: str
    image: str | None
    python_path: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def render(job: Job, site: Site, place: JobContext) -> str:
    """Return the batch script. Each value that a user typed becomes one quoted word.

    Raises LaunchError for a value that is invalid in a line that the scheduler reads.
    """
    scheduler = site_scheduler(site)
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
    if site.ports is not None:
        variables.append(("SHOAL_PORTS", Shell(f"${{SHOAL_PORTS:-{site.ports}}}")))
    text = environment.get_template("scheduler").render(
        scheduler=Shell(scheduler.profile.title),
        shell=shell,
        mark=Shell(MARK),
        site=Shell(re.sub(r"\W", "-", site.name)),
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
        local=quote_expression(site.local or scheduler.shell["local"]),
        stage=[os.path.split(path) for path in place.stage],
        last_exit=quote_words(
            [
                *_container(site, place),
                *module_command("shoal", "last-exit", place.run, python=_staged(place.python, place)),
            ]
        ),
        program=quote_words(_around(_program(job, site, place, scheduler))),
        turns=[(turn.log, _turn(turn, job, site, place, scheduler)) for turn in job.turns],
        limit=job.limit,
        sweep=[quote_words(_staged(word, place) for word in words) for words in place.sweep],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _turn(turn: JobCommand, job: Job, site: Site, place: JobContext, scheduler: Scheduler) -> Shell:
    """Return the command of a turn: a step of the job, with as many processes on each node."""
    own = replace(job, processes=turn.processes, per_node=turn.processes // job.nodes)
    place = replace(place, args=(*place.args, *turn.args))
    program = _around(_program(own, site, place, scheduler))
    return quote_words([Shell(scheduler.launch_command(own, step=True)), *program])


def _around(program: Sequence[str]) -> Sequence[str]:
    """Return the program of each rank, or agent of torchrun, in the shell that keeps its exit code."""
    return ["bash", "-c", *_KEEPING, *program]


def _program(job: Job, site: Site, place: JobContext, scheduler: Scheduler) -> Sequence[str]:
    """Return the words of the command of each rank, or agent of torchrun."""
    words = _container(site, place)
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


def _container(site: Site, place: JobContext) -> list[str]:
    """Return the words before a command that runs it in the job's container, if there is one."""
    if place.image is None:
        return []
    words = [*site.container]
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
