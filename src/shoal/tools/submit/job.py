"""The request of a user, and the job that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.util.decision import Decision

REQUEUES = 100
"""Largest number of times that a job is requeued."""


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
    most. `choices` has Shoal's decisions by name: cpus, qos and lead.
    """

    name: str
    processes: int
    per_node: int
    gpu_resource: str | None
    multithread: bool
    lead: int
    launcher: str
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
