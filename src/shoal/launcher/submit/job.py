"""What a user requests, and the job that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.util.decision import Decision

REQUEUES = 100
"""The number of times that a job is requeued at most."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One of several commands that a job runs one after the other on the same nodes.

    `args` come after those of the request. What `processes` print goes to the file `log`; the exit
    code, begin and end, in seconds, go to a file with the same name and `.end`.
    """

    args: tuple[str, ...]
    processes: int
    log: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job as requested: what is None is left to the site. `gpus` are those of each node.

    `processes` are those of all nodes, `time` is in seconds, `sweep` has the words that each element
    of an array adds to `args`. `partition`, `constraint`, `qos` and `account` are names of the site's
    scheduler, `options` further directives in its own words. `stage` are files and directories that
    each node gets a copy of. `workers` is the number of loader workers that the script seems to
    start. With `turns` these are run, each for at most `limit` seconds, and `processes` is the number
    of the largest one. `variables` are set for all processes.
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
    turns: tuple[Turn, ...] = ()
    limit: int = 0
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with all decisions made: the batch script gets each value, and leaves None out.

    A job gets its signal to save `lead` seconds before its end. With `requeue` it may then put itself
    back into the queue, also after `restarts` failures. `per_node` is the number of processes on each
    node, or on most. `choices` has what Shoal chose, by name: cpus, qos and lead.
    """

    name: str
    nodes: int
    processes: int
    per_node: int
    gpus: int
    gpu_resource: str | None
    cpus: int | None
    memory: str | None
    partition: str | None
    constraint: str | None
    qos: str | None
    account: str | None
    multithread: bool
    time: int
    lead: int
    launcher: str
    requeue: bool
    requeues: int = REQUEUES
    chain: int
    restarts: int
    elements: int
    at_once: int | None
    options: tuple[str, ...]
    turns: tuple[Turn, ...]
    limit: int
    choices: Mapping[str, Decision[Any]]

    @property
    def signal(self) -> str:
        """The signal that asks ranks to save; torchrun's agents pass on no other."""
        return "TERM" if self.launcher == "torchrun" else "USR1"

    @property
    def to_batch(self) -> bool:
        """Whether the batch script passes the signal on: no scheduler knows the ranks of mpirun."""
        return self.launcher == "mpirun"
