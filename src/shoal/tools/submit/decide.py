"""Decisions that turn a request and a site into a job, each with its reason."""

from __future__ import annotations

import re
from math import ceil
from pathlib import PurePath

from shoal.tools.submit.scheduler import Job, JobRequest, SchedulerProfile
from shoal.tools.submit.site_catalog import Partition, Qos, Site, site_scheduler
from shoal.util.arguments import check_choice
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

_SIGNAL_STEP = 5


def partition_of(request: JobRequest, site: Site) -> Partition:
    """Return the requested partition, without known limits if the site does not list it."""
    known = site.partition(request.partition)
    if known is not None:
        return known
    return Partition(name=request.partition or "", option=request.partition)


def processes_of(request: JobRequest) -> int:
    """Return the number of processes on all nodes: one per GPU, or one per node without GPUs."""
    if request.processes is not None:
        return request.processes
    return request.nodes * max(1, request.gpus)


def decide(request: JobRequest, site: Site, *, save: float | None) -> Job:
    """Return the job to submit. `save` is the time in seconds of a step and a save, if measured.

    Raises LaunchError if the scheduler does not have the requested launcher.
    """
    scheduler = site_scheduler(site).profile
    partition = partition_of(request, site)
    processes = processes_of(request)
    cpus = _cpus(request, partition, scheduler)
    qos = _qos(request, partition)
    lead = _lead(request, site, save, scheduler)
    account = request.account
    if account is not None and "@" not in account:
        account += partition.account
    decided = {
        "name": request.name or _name(request.script),
        "processes": processes,
        "cpus": cpus.value,
        "partition": partition.option,
        "constraint": request.constraint or partition.constraint,
        "qos": qos.value,
        "account": account,
        "container": request.container or site.image,
        "launcher": _launcher(request.launcher or site.launcher, scheduler),
        "options": (*site.options, *request.options),
    }
    return Job(
        **vars(request) | decided,
        per_node=ceil(processes / request.nodes),
        gpu_resource=partition.gpu_resource,
        multithread=site.multithread,
        mpirun=site.mpirun,
        parallel_environment=partition.parallel_environment,
        site=site.name,
        ports=site.ports,
        local=site.local,
        container_command=site.container,
        volumes=site.volumes,
        setup=site.setup if partition.setup is None else partition.setup,
        lead=lead.value,
        requeue=site.requeue and request.chain == 1 and not request.turns,
        choices={"cpus": cpus, "qos": qos, "lead": lead},
    )


def _launcher(name: str | None, scheduler: SchedulerProfile) -> str:
    known = scheduler.launchers
    check_choice(LaunchError, "shoal submit", "--launcher", name or known[0], known)
    return name or known[0]


def _qos(request: JobRequest, partition: Partition) -> Decision[str | None]:
    """Return the first QoS whose limits fit the job, or None if that is the default one."""
    if request.qos is not None:
        return Decision(what="qos", value=request.qos, reason=GIVEN)
    gpus = request.nodes * request.gpus
    for qos in partition.qos:
        if fits(qos, request.time, gpus):
            if qos is partition.qos[0]:
                return Decision(what="qos", value=None, reason=f"{qos.name}, the default")
            reason = f"the first that allows {gpus} GPUs for this time"
            return Decision(what="qos", value=qos.name, reason=reason)
    return Decision(what="qos", value=None, reason="the site's file lists none that fits")


def fits(qos: Qos, time: int, gpus: int) -> bool:
    """Return whether a job with this time, in seconds, and these GPUs is within the limits of a QoS."""
    return (qos.time is None or time <= qos.time) and (qos.gpus is None or gpus <= qos.gpus)


def _cpus(
    request: JobRequest, partition: Partition, scheduler: SchedulerProfile
) -> Decision[int | None]:
    if request.cpus is not None:
        return Decision(what="cpus", value=request.cpus, reason=GIVEN)
    if partition.cpus_per_gpu is None or not request.gpus:
        reason = f"left to {scheduler.title}: the site's file has no number"
        return Decision(what="cpus", value=None, reason=reason)
    each = ceil(processes_of(request) / request.nodes)
    # Fewer processes than GPUs share the cores of all GPUs.
    value = max(1, partition.cpus_per_gpu * request.gpus // each)
    return Decision(
        what="cpus",
        value=value,
        reason=f"{partition.cpus_per_gpu} for each GPU of {partition.name}",
    )


def _lead(
    request: JobRequest, site: Site, save: float | None, scheduler: SchedulerProfile
) -> Decision[int]:
    if save is not None:
        value = _rounded(2 * save + scheduler.signal_delay)
        return Decision(what="lead", value=value, reason=f"a step and a save took {save:.0f} s before")
    value = min(site.lead, _rounded(request.time / 4))
    return Decision(what="lead", value=value, reason="no save of this run has been measured yet")


def _rounded(seconds: float) -> int:
    return max(_SIGNAL_STEP, ceil(seconds / _SIGNAL_STEP) * _SIGNAL_STEP)


def _name(script: str) -> str:
    return re.sub(r"[^\w.-]+", "-", PurePath(script).stem, flags=re.ASCII).strip("-") or "shoal"
