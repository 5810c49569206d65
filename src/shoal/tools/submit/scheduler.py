"""A job, and the contract between `shoal submit` and a scheduler.

All modules of this package, except the scheduler's own, use a scheduler only through this contract.
Schedulers that take a batch script share `batch_script.py`. CONTRIBUTING.md describes how to add one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shoal.tools.submit.times import spell_time
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

REQUEUES = 100
"""Largest number of times that a job is requeued."""

BATCH_KEYS = ("container", "gpu_resource", "image", "local", "mpirun", "options", "setup")
"""The keys of site files for batch scripts."""

MARK = "Written by `shoal submit`"
"""The text by which Shoal recognizes the files that it writes for schedulers."""


@dataclass(frozen=True, kw_only=True)
class JobCommand:
    """One of several commands that a job runs one after the other on the same nodes.

    `args` follow those of the request. The output of `processes` goes to the file `log`; the exit code,
    begin and end, in seconds, go to a file with the same name and `.end`.
    """

    args: tuple[str, ...]
    processes: int
    log: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job as requested; the site decides fields that are None. `gpus` are those of each node.

    `processes` are those of all nodes, `time` is in seconds, `sweep` has the words that each element of
    an array adds to `args`. `partition`, `constraint`, `qos` and `account` are names of the site's
    scheduler, `options` further directives in its syntax. Each node gets a copy of the files and
    directories in `stage`. `workers` is the number of loader workers that the script seems to start. If
    there are `turns`, these are run, each for at most `limit` seconds, and `processes` is the number of
    the largest one. `variables` are set for all processes.
    """

    script: str
    args: tuple[str, ...] = ()
    time: int
    nodes: int = 1
    gpus: int = 0
    processes: int | None = None
    cpus: int | None = None
    memory: str | None = None
    partition: str | None = None
    constraint: str | None = None
    qos: str | None = None
    account: str | None = None
    name: str | None = None
    launcher: str | None = None
    container: str | None = None
    python: str | None = None
    sweep: tuple[tuple[str, ...], ...] = ()
    at_once: int | None = None
    chain: int = 1
    restarts: int = 0
    options: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    workers: int = 0
    turns: tuple[JobCommand, ...] = ()
    limit: int = 0
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job(JobRequest):
    """A job with all decisions made: the batch script contains each value that is not None.

    A job gets its signal to save `lead` seconds before its end. With `requeue` it may then requeue
    itself, even after `restarts` failures. `per_node` is the number of processes on each node, or on
    most. The batch script begins with the lines of `setup`, unquoted. `mpirun` are the site's words for
    the launcher of that name, with `{per_node}`, `{cpus}` and variables of the shell;
    `container_command` are those before an image. `site`, `ports`, `local` and `volumes` are the
    site's too. `choices` has Shoal's decisions by name: cpus, qos and lead.
    """

    name: str
    processes: int
    per_node: int
    gpu_resource: str | None
    multithread: bool
    setup: tuple[str, ...]
    lead: int
    launcher: str
    mpirun: tuple[str, ...]
    parallel_environment: str | None
    site: str
    ports: str | None
    local: str | None
    container_command: tuple[str, ...]
    volumes: tuple[str, ...]
    requeue: bool
    requeues: int = REQUEUES
    choices: Mapping[str, Decision[Any]]

    @property
    def elements(self) -> int:
        """The number of elements of an array; 0 for other jobs."""
        return len(self.sweep)

    @property
    def signal(self) -> str:
        """The signal that asks ranks to save; torchrun's agents forward no other."""
        return "TERM" if self.launcher == "torchrun" else "USR1"

    @property
    def to_batch(self) -> bool:
        """Whether the batch script forwards the signal: no scheduler knows the ranks of mpirun."""
        return self.launcher == "mpirun"


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


JobPhase = Literal["waiting", "running", "ended"]


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job, or an element of an array, that the scheduler knows.

    `state`, `ran`, `limit` and `reason` are the scheduler's own words, for users. `never_starts` is the
    reason why a waiting job can never start; it is empty if the job may start.
    """

    job: str
    phase: JobPhase
    state: str
    ran: str = ""
    limit: str = ""
    reason: str = ""
    never_starts: str = ""


@dataclass(frozen=True, kw_only=True)
class SchedulerProfile:
    """Facts about a scheduler for messages and decisions.

    `title` is its name for users, `submit_program` the command that takes a job's file, whose name is
    `file`, `own_program` one that no other scheduler has. `launchers` can start the processes of a job;
    the first one is the default. The signal before the time limit may come up to `signal_delay` seconds
    late. `site_keys` are the keys of site files that not all schedulers have, and this one has.
    """

    title: str
    submit_program: str
    own_program: str
    launchers: tuple[str, ...]
    signal_delay: int
    file: str = "job.sh"
    site_keys: tuple[str, ...] = BATCH_KEYS


class Scheduler(Protocol):
    """A scheduler. Its methods raise LaunchError if it is missing, unreachable or rejects a request."""

    @property
    def profile(self) -> SchedulerProfile:
        """Facts about it for messages and decisions."""

    def render(self, job: Job, place: JobContext) -> str:
        """Return the text of the file that `submit` takes. Each value in it is data.

        Raises LaunchError for a value that is invalid there, or that the scheduler has no form of.
        """

    def check_available(self) -> None:
        """Raise LaunchError if jobs can't be submitted on this machine."""

    def check_queue(self, job: Job) -> None:
        """Raise LaunchError for a job that its queue would never start, or start on other nodes.

        What `submit` rejects itself need not be checked.
        """

    def submit(self, script: Path, *, after: str | None) -> str:
        """Submit a job's file and return the id of the job, which starts when `after` has ended."""

    def queued(self, jobs: Sequence[str]) -> list[QueuedJob]:
        """Return those jobs, or elements of them, that the scheduler still knows."""

    def log_command(self, jobs: Sequence[str], files: Sequence[Path], *, follow: bool) -> list[str]:
        """Return the command that prints the logs of jobs, which may be `files` of the job's folder.

        Raises LaunchError if there are none yet. `follow` is to print what is added, until Ctrl-C.
        """

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs at once; jobs that have ended already are ignored."""

    def cancel_after_save(self, jobs: Sequence[str], *, signal: str, to_batch: bool) -> None:
        """Cancel the jobs that wait, and send `signal` to the processes of those that run.

        With `to_batch` the batch script gets the signal instead. It also sends the signal itself if it
        looks for the mark of `shoal cancel`, as those that extend `timed_job.sh.jinja` do.
        """

    def draft_site(self, name: str) -> str:
        """Return the text of a site file, drafted from the scheduler's description of its cluster."""


def mpirun_command(job: Job) -> str:
    """Return the command of the launcher mpirun, which gets the nodes from the scheduler."""
    values = {"per_node": job.per_node, "cpus": job.cpus or 1}
    words = [word.format(**values) for word in job.mpirun]
    own = (quote_expression(word) if "$" in word else word for word in words)
    return quote_words([*own, "-n", job.processes])


def check_limits(job: Job, *, time: float, nodes: float) -> None:
    """Raise LaunchError for a job with more than its queue allows, in seconds and nodes."""
    queue = "the default queue" if job.partition is None else f"the queue {job.partition}"
    if job.time > time:
        longest = spell_time(int(time))
        raise LaunchError(
            given=f"--time {spell_time(job.time)}",
            found=f"{queue} ends jobs after {longest}",
            fix=f"use --time {longest} or another --partition (--force submits it anyway)",
        )
    if job.nodes > nodes:
        raise LaunchError(
            given=f"--nodes {job.nodes}",
            found=f"a job in {queue} has at most {nodes:.0f} nodes",
            fix=f"use --nodes {nodes:.0f} or another --partition (--force submits it anyway)",
        )


def checked(title: str, given: str, value: str, pattern: str, what: str) -> str:
    """Return a value. Raises LaunchError unless all of it matches `pattern`, which is `what`."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise LaunchError(
            given=f"{given} {value!r}", found=f"{title} would reject this value", fix=f"use {what}"
        )
    return value


class Shell(str):
    """Shell text, which is not quoted. A value of any other type becomes one quoted word."""


def refuse_used(options: Mapping[str, tuple[object, str]], found: str) -> None:
    """Raise LaunchError for the first option that is used: by option, its value and what to do."""
    for given, (used, fix) in options.items():
        if used:
            raise LaunchError(given=given, found=found, fix=fix)


def quote_word(value: object) -> str:
    """Return a value as one word of a shell script, without line breaks."""
    if isinstance(value, Shell):
        return value
    # Line breaks become bash's $'\n', so that no line of the script begins with the user's text.
    return shlex.quote(str(value)).replace("\n", "'$'\\n''")


def quote_expression(text: str) -> Shell:
    """Return a string as one word in which bash replaces variables (`$USER`) and runs nothing."""
    quoted = re.sub(r'(["\\`]|\$(?=\())', r"\\\1", text)
    return Shell('"' + quoted.replace("\n", "\"$'\\n'\"") + '"')


def quote_words(words: Iterable[object]) -> Shell:
    """Return values as words of a shell script, separated by spaces."""
    return Shell(" ".join(quote_word(word) for word in words))
