"""The resources and limits of a cluster: a site, its partitions and their qualities of service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service and its limits: seconds, and GPUs of one job."""

    name: str
    time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Nodes of one kind, under the name that users pass as `--partition`.

    Schedulers other than Slurm call it a queue. `option` is the name that the scheduler gets, None if
    it needs none. `qos` are in the order in which they are tried; a job without one gets the first.
    `account` is appended to an account. `gpu_resource` is the scheduler's name for the GPUs of these
    nodes, None for its usual one. A number that is None is not known.
    """

    name: str
    option: str | None = None
    constraint: str | None = None
    account: str = ""
    gpu_resource: str | None = None
    gpus: int | None = None
    cores: int | None = None
    cpus_per_gpu: int | None = None
    nodes: int | None = None
    time: int | None = None
    qos: tuple[Qos, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    `setup` are the lines of the site file with which each batch script begins, unquoted. `scheduler` is
    a name in `schedulers.SCHEDULERS`. `tried` describes the tests of the site file, and is empty if
    there were none. `hosts` are patterns of the names of login nodes. `launcher` is None for the
    scheduler's own. Without `multithread`, processes get physical cores. `container` are the words
    before an image. `local` is a directory on a disk of the node, as a shell expression, None for the
    scheduler's. `options` are further directives of the scheduler.
    """

    name: str
    scheduler: str = "slurm"
    about: str = ""
    tried: str = ""
    hosts: tuple[str, ...] = ()
    launcher: str | None = None
    multithread: bool = True
    ports: str | None = None
    memory: bool = True
    requeue: bool = True
    whole_nodes: bool = False
    lead: int = 300
    python: str | None = None
    mpirun: tuple[str, ...] = ("mpirun",)
    container: tuple[str, ...] = ("apptainer", "exec", "--nv")
    local: str | None = None
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    default: str | None = None
    partitions: Mapping[str, Partition] = field(default_factory=dict)

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition of that name, or the default one for None; None if it is not listed."""
        return self.partitions.get(name if name is not None else self.default or "")
