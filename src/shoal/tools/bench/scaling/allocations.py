"""The division of a study into jobs, one for each number of nodes: functions of plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.tools.bench.scaling.configurations import Configuration
from shoal.tools.submit.site_catalog import Partition, Site
from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """The user's request to a cluster. The site's defaults replace the fields that are None.

    `gpus` and `tasks` are those of a node, one process for each; `cpus` are cores of each process.
    `time`, in seconds, is that of each job. With `force`, jobs are submitted although checks fail.
    """

    site: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int | None = None
    gpus: int | None = None
    tasks: int | None = None
    cpus: int | None = None
    options: tuple[str, ...] = ()
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The capacity of nodes: at most `tasks` processes on each, and at most `most` nodes per job.

    Each process has a GPU, or else `cpus` cores; None leaves the number to the scheduler.
    """

    where: str
    tasks: int
    gpus: bool
    cpus: int | None
    most: int | None

    def nodes(self, processes: int) -> int:
        """Return the number of nodes for `processes`, with the same number of processes on each."""
        return math.ceil(processes / self.tasks)

    def check(self, sizes: Sequence[int]) -> None:
        """Raise LaunchError for sizes that do not fit."""
        given = f"-n {','.join(map(str, sizes))}"
        for size in sizes:
            nodes = self.nodes(size)
            if self.most is not None and nodes > self.most:
                raise LaunchError(
                    given=given,
                    found=f"the maximum on {self.where} is {self.most} nodes per job with {self.tasks} "
                    f"processes each: {self.most * self.tasks}",
                    fix=f"pass -n with at most {self.most * self.tasks}",
                )
            if size % nodes:
                raise LaunchError(
                    given=given,
                    found=f"{size} processes can't be split evenly over {nodes} nodes with at most "
                    f"{self.tasks} each",
                    fix=f"pass -n with {nodes * (size // nodes)} or {nodes * self.tasks} instead",
                )

    def description(self) -> dict[str, str]:
        """Return the facts about the nodes that a study records."""
        cores = "" if self.cpus is None else f" with {self.cpus} cores each"
        return {"site": self.where, "a node": f"{self.tasks} processes{cores}"}


def node_capacity(site: Site, asked: ClusterRequest) -> Capacity:
    """Return the capacity of a site's nodes; raise LaunchError if it is unknown."""
    partition = site.partition(asked.partition)
    if partition is None:
        if site.partitions:
            raise LaunchError(
                given=f"--partition {asked.partition}" if asked.partition else "no --partition",
                found=f"{site.name} has {', '.join(site.partitions)}",
                fix=f"--partition {next(iter(site.partitions))}",
            )
        partition = Partition(name=asked.partition or "")
    gpus = asked.gpus
    if gpus is None:
        gpus = 0 if asked.tasks else partition.gpus or 0
    cpus = asked.cpus if asked.cpus or not gpus else partition.cpus_per_gpu
    tasks = asked.tasks or gpus or (partition.cores or 0) // (cpus or 1)
    if not tasks:
        raise LaunchError(
            given=f"--submit on the site {site.name}",
            found="the number of processes per node is unknown, since neither GPUs nor cores are known",
            fix="pass --gpus-per-node 4, or --tasks-per-node 8; `shoal sites new NAME` asks the "
            "scheduler once and keeps the answer",
        )
    if cpus is None and not gpus and partition.cores:
        cpus = max(1, partition.cores // tasks)
    where = f"{partition.name} of {site.name}" if partition.name else site.name
    return Capacity(where=where, tasks=tasks, gpus=bool(gpus), cpus=cpus, most=partition.nodes)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A submitted job: nodes, and the trainings that run on them one after the other.

    A training is a pair (round, configuration). Trainings that mpirun starts are in a separate job.
    """

    nodes: int
    mpi: bool
    trainings: tuple[tuple[int, Configuration], ...]

    @property
    def name(self) -> str:
        """A name that is valid for a directory."""
        return f"nodes-{self.nodes}" + ("-mpi" if self.mpi else "")

    @property
    def sizes(self) -> list[int]:
        """The numbers of processes, each once."""
        return sorted({configuration.processes for _, configuration in self.trainings})

    @property
    def per_node(self) -> int:
        """The largest number of processes per node."""
        return self.sizes[-1] // self.nodes


def allocations(missing: Sequence[tuple[int, Configuration]], capacity: Capacity) -> list[Allocation]:
    """Return the jobs in which these trainings run, from few nodes to many.

    All sizes that fit on the same number of nodes use the same job, in the order of the plan. So
    trainings to be compared run on the same nodes at about the same time, and wait in the queue once.
    """
    found: dict[tuple[int, bool], list[tuple[int, Configuration]]] = {}
    for number, configuration in missing:
        key = capacity.nodes(configuration.processes), configuration.backend == "mpi"
        found.setdefault(key, []).append((number, configuration))
    return [
        Allocation(nodes=nodes, mpi=mpi, trainings=tuple(trainings))
        for (nodes, mpi), trainings in sorted(found.items(), key=lambda item: item[0])
    ]
