"""A study as jobs of a cluster: which trainings share nodes, and what they ask for."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.distributed.env_vars import THREADS
from shoal.tools.bench.scaling import jobs
from shoal.tools.bench.scaling.configurations import (
    Configuration,
    ScriptSubject,
    StudyOptions,
    check_study_options,
)
from shoal.tools.bench.scaling.directory import (
    FILE,
    Study,
    begin_study,
    forget_study,
    lock_study,
    plan_study,
)
from shoal.tools.submit import status
from shoal.tools.submit.scheduler import JobCommand, JobPhase, JobRequest
from shoal.tools.submit.site_catalog import Partition, Site, site_scheduler
from shoal.tools.submit.submit import Submission, SubmitOptions, submit
from shoal.util.errors import LaunchError, ShoalError


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


SUBMITTED = "submitted"
"""The directory of a study with its submitted jobs, as `shoal submit` keeps them."""
MARK = "allocation"
"""A file in the folder of a training with the name of the submitted job in which it runs."""
SPARE = 60
"""Seconds of a job for each training beyond its limit, for its start and end."""
TIMED_OUT = 124


@dataclass(frozen=True, kw_only=True)
class PendingTrainings:
    """Trainings without a result. `folder` is that of their submitted job, None if there is none.

    `state` is the state that the scheduler reports, or one known without the scheduler.
    """

    trainings: int
    folder: Path | None = None
    numbers: tuple[str, ...] = ()
    state: str = "not submitted"
    phase: JobPhase = "ended"

    @property
    def more(self) -> str:
        """The command that shows more about it."""
        if self.folder is None:
            return "the same `shoal bench scaling` again"
        command = {"waiting": "status", "running": "logs -f", "ended": "logs"}[self.phase]
        return f"shoal {command} {shlex.quote(str(self.folder))}"


def plan_jobs(
    path: Path, options: StudyOptions, asked: ClusterRequest, site: Site
) -> Iterator[tuple[Allocation, Submission]]:
    """Yield the jobs that `submit_jobs` would submit, without a change on the disk.

    Raises LaunchError for invalid options, or if a job does not fit the site.
    """
    check_study_options(options)
    fits = node_capacity(site, asked)
    fits.check(options.processes)
    study = plan_study(path, options, fits.description())
    for each in allocations(study.missing(), fits):
        yield each, _hand_in(study, each, fits, asked, site, dry=True)


def submit_jobs(
    path: Path, options: StudyOptions, asked: ClusterRequest, site: Site
) -> Iterator[tuple[Allocation, Submission]]:
    """Submit the trainings without a result, unless a job with them waits or runs; yield each job.

    Raises LaunchError as `plan_jobs` does, before anything is submitted, and if the scheduler rejects
    a job. The jobs before it stay, and the same call continues from there; if there are none, no
    files are left behind.
    """
    list(plan_jobs(path, options, asked, site))
    site_scheduler(site).check_available()
    fits, fresh = node_capacity(site, asked), not (path / FILE).exists()
    study = begin_study(path, options, fits.description())
    with lock_study(study):
        gather_results(study)
        for each in allocations(study.missing(), fits):
            if status.active_jobs(_folder(study, each.name)):
                continue
            _prepare(study, each)
            try:
                done = _hand_in(study, each, fits, asked, site, dry=False)
            except ShoalError:
                if fresh:
                    forget_study(study)
                raise
            fresh = False
            yield each, done


def gather_results(study: Study) -> None:
    """Store the results of submitted trainings that have ended."""
    for number, configuration in study.missing():
        done = _end(study.job(configuration, number))
        if done is not None:
            study.keep(configuration, jobs.read_job_result(study, configuration, number, done))


def list_waiting(study: Study) -> list[PendingTrainings]:
    """Return the trainings without a result, by their submitted job."""
    counts = Counter(
        _allocation(study.job(configuration, number)) for number, configuration in study.missing()
    )
    return [_state(study, name, count) for name, count in sorted(counts.items())]


def _state(study: Study, name: str, trainings: int) -> PendingTrainings:
    if not name:
        return PendingTrainings(trainings=trainings)
    folder = _folder(study, name)
    try:
        found = status.status(folder)
    except LaunchError as error:  # read on another machine, or never submitted
        return PendingTrainings(trainings=trainings, folder=folder, state=error.found)
    known = PendingTrainings(
        trainings=trainings, folder=folder, numbers=found.record.jobs, state="ended"
    )
    for first in found.queued[:1]:
        return replace(known, state=first.state.lower(), phase=first.phase)
    return known


def _request(study: Study, allocation: Allocation, fits: Capacity, asked: ClusterRequest) -> JobRequest:
    options = study.options
    limit = math.ceil(options.limit)
    turns = [_turn(study, *training) for training in allocation.trainings]
    return JobRequest(
        script=jobs.script_of(options),
        time=asked.time or 60 * math.ceil(len(turns) * (limit + SPARE) / 60),
        nodes=allocation.nodes,
        gpus=allocation.per_node if fits.gpus else 0,
        processes=allocation.sizes[-1],
        cpus=fits.cpus,
        partition=asked.partition,
        qos=asked.qos,
        account=asked.account,
        name=f"{study.path.resolve().name}-{allocation.name}",
        launcher="mpirun" if allocation.mpi else None,
        options=asked.options,
        turns=tuple(turns),
        limit=limit,
        variables=((THREADS, str(options.threads)),) if options.threads else (),
    )


def _turn(study: Study, number: int, configuration: Configuration) -> JobCommand:
    folder = study.job(configuration, number).absolute()
    return JobCommand(
        args=tuple(jobs.arguments_of(study.options, configuration, folder)),
        processes=configuration.processes,
        log=str(folder / jobs.LOG),
    )


def _hand_in(
    study: Study,
    allocation: Allocation,
    fits: Capacity,
    asked: ClusterRequest,
    site: Site,
    *,
    dry: bool,
) -> Submission:
    # Shoal's own worker needs no copy; a function is imported from the working directory.
    copy = isinstance(study.options.subject, ScriptSubject)
    run = _folder(study, allocation.name)
    options = SubmitOptions(run=run, dry=dry, copy=copy, force=asked.force)
    return submit(_request(study, allocation, fits, asked), site, options)


def _prepare(study: Study, allocation: Allocation) -> None:
    for number, configuration in allocation.trainings:
        folder = jobs.prepare_job(study, configuration, number)
        (folder / MARK).write_text(f"{allocation.name}\n")


def _folder(study: Study, name: str) -> Path:
    return study.path / SUBMITTED / name


def _allocation(folder: Path) -> str:
    """Return the name of the job in which a training was submitted; empty if there is none."""
    try:
        name = (folder / MARK).read_text().strip()
    except OSError:
        return ""
    return name if name.replace("-", "").isalnum() else ""


def _end(folder: Path) -> jobs.Done | None:
    """Return how a training ended, as the batch script recorded it; None if it has not ended."""
    try:
        text = (folder / f"{jobs.LOG}.end").read_text()
        code, began, ended = (int(word) for word in text.split())
    except (OSError, ValueError):
        return None
    return jobs.Done(None if code == TIMED_OUT else code, float(began), float(ended - began))
