"""Divide a study into jobs, one for each number of nodes: functions of plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.bench.scaling.configurations import Configuration
from shoal.launcher.submit.site import Partition, Site
from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """What the user requests of a cluster; what is None is left to the site.

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
    """What nodes take of a study: `tasks` processes each at most, and one job at most `most` nodes.

    Each process has a GPU, or else `cpus` cores, None being left to the scheduler.
    """

    where: str
    tasks: int
    gpus: bool
    cpus: int | None
    most: int | None

    def nodes(self, processes: int) -> int:
        """How many nodes so many processes take, as many on each."""
        return math.ceil(processes / self.tasks)

    def check(self, sizes: Sequence[int]) -> None:
        """Raises LaunchError for sizes that do not fit."""
        given = f"-n {','.join(map(str, sizes))}"
        for size in sizes:
            nodes = self.nodes(size)
            if self.most is not None and nodes > self.most:
                raise LaunchError(
                    given=given,
                    found=f"{self.where} gives a job at most {self.most} nodes with {self.tasks} "
                    f"processes each: {self.most * self.tasks}",
                    fix=f"-n with at most {self.most * self.tasks}",
                )
            if size % nodes:
                raise LaunchError(
                    given=given,
                    found=f"{size} processes are not as many on each of {nodes} nodes, which take "
                    f"{self.tasks} each",
                    fix=f"-n with {nodes * (size // nodes)} or {nodes * self.tasks} in its place",
                )

    def description(self) -> dict[str, str]:
        """Return what a study records of the nodes that it ran on."""
        cores = "" if self.cpus is None else f" with {self.cpus} cores each"
        return {"site": self.where, "a node": f"{self.tasks} processes{cores}"}


def node_capacity(site: Site, asked: ClusterRequest) -> Capacity:
    """Return what the nodes of a site take; LaunchError if neither it nor the user says how much."""
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
            found="how many processes a node takes: neither GPUs nor cores are known here",
            fix="--gpus-per-node 4, or --tasks-per-node 8; "
            "`shoal sites new NAME` asks the scheduler for good",
        )
    if cpus is None and not gpus and partition.cores:
        cpus = max(1, partition.cores // tasks)
    where = f"{partition.name} of {site.name}" if partition.name else site.name
    return Capacity(where=where, tasks=tasks, gpus=bool(gpus), cpus=cpus, most=partition.nodes)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A submitted job: nodes, and what runs on them one after the other, as (round, configuration).

    Trainings that mpirun starts are in a separate job.
    """

    nodes: int
    mpi: bool
    trainings: tuple[tuple[int, Configuration], ...]

    @property
    def name(self) -> str:
        """A name that may be a directory's."""
        return f"nodes-{self.nodes}" + ("-mpi" if self.mpi else "")

    @property
    def sizes(self) -> list[int]:
        """The numbers of processes, each once."""
        return sorted({configuration.processes for _, configuration in self.trainings})

    @property
    def per_node(self) -> int:
        """Processes of a node, where there are most."""
        return self.sizes[-1] // self.nodes


def allocations(missing: Sequence[tuple[int, Configuration]], capacity: Capacity) -> list[Allocation]:
    """Return the jobs in which these trainings run, from few nodes to many.

    All sizes that fit on the same number of nodes share them, in the order of the plan: so what is
    compared most closely has the same nodes at about the same time, and waits in the queue once.
    """
    found: dict[tuple[int, bool], list[tuple[int, Configuration]]] = {}
    for number, configuration in missing:
        key = capacity.nodes(configuration.processes), configuration.backend == "mpi"
        found.setdefault(key, []).append((number, configuration))
    return [
        Allocation(nodes=nodes, mpi=mpi, trainings=tuple(trainings))
        for (nodes, mpi), trainings in sorted(found.items(), key=lambda item: item[0])
    ]
