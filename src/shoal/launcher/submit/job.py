"""What somebody asks for, and the job that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shoal.util.decision import Decision

LauncherName = Literal["srun", "torchrun", "mpirun"]
LAUNCHERS: tuple[str, ...] = get_args(LauncherName)
"""What can start the processes of a job."""

REQUEUES = 100
"""How often a job is put back into the queue at most."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One of several commands that a job runs after each other on the same nodes.

    `args` come after those of the request, in so many processes. What it prints goes to the file `log`;
    its exit code, beginning and end, in seconds, go to a file beside that, `log` with `.end`.
    """

    args: tuple[str, ...]
    processes: int
    log: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job as it was asked for: what is None is left to the site. `gpus` are those of each node.

    `processes` are those of all nodes, `time` is in seconds, `sweep` has the words that each element
    of an array adds to `args`. `stage` are files and directories that each node gets a copy of.
    `workers` is how many loader workers the script seems to start. With `turns` these are run, each
    for at most `limit` seconds, and `processes` is how many the largest has. `variables` are set for
    all processes.
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
    launcher: LauncherName | None = None
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
    """A job that is decided: each value is what the batch script says; None is left out of it.

    `lead` is how many seconds before its end a job is told to save, and `requeue` whether it may then
    put itself back into the queue, also after `restarts` failures. `choices` has what Shoal chose, by
    name: cpus, qos and lead.
    """

    name: str
    nodes: int
    processes: int
    per_node: int
    gpus: int
    gres: str
    cpus: int | None
    memory: str | None
    partition: str | None
    constraint: str | None
    qos: str | None
    account: str | None
    hint: str | None
    time: int
    lead: int
    launcher: LauncherName
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
        """Whether the batch script gets it, to hand it on: ranks of mpirun are no tasks of Slurm's."""
        return self.launcher == "mpirun"
