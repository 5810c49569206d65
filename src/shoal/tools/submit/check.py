"""Checks of a job before it enters the queue: values that the site rejects, and wasted resources."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from math import ceil

from shoal.tools.submit.decide import fits, partition_of, processes_of
from shoal.tools.submit.scheduler import Job, JobRequest
from shoal.tools.submit.site_catalog import Partition, Site, site_scheduler
from shoal.tools.submit.times import gpu_hours, spell_time
from shoal.util.errors import LaunchError
from shoal.util.python import code_command
from shoal.util.safe_text import MASK, is_secret, masked

_SECONDS = 60.0
_WORKER_OPTIONS = ("--workers", "--num-workers", "--num_workers")


def check_job(request: JobRequest, site: Site, job: Job) -> None:
    """Raise LaunchError with all objections to a job."""
    found = list(objections(request, site, job))
    if found:
        raise LaunchError(
            given="; ".join(dict.fromkeys(each.given for each in found)),
            found="\n       ".join(each.found for each in found),
            fix="; ".join(dict.fromkeys(each.fix for each in found)) + " (--force submits it anyway)",
        )


def check_interpreter(request: JobRequest, source: str) -> None:
    """Raise LaunchError if --python does not exist, or lacks the Shoal that a script needs.

    An interpreter in a container is not checked. The version is not checked if the interpreter can't
    run here, such as one for another architecture. `source` is the text of the script.
    """
    python = request.python
    if python is None or request.container is not None:
        return
    found = shutil.which(python)
    if found is None:
        there = os.path.exists(python)
        raise LaunchError(
            given=f"--python {python}",
            found="it is not executable" if there else "there is no such program",
            fix="pass --python with the path of an interpreter, or leave it out to use this one",
        )
    if "shoal" not in source:
        return
    asked = "from importlib.metadata import version; print('shoal', version('shoal'))"
    try:
        done = subprocess.run(
            code_command(asked, python=found),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    here = f"shoal {metadata.version('shoal')}"
    said = (done.stdout.strip().splitlines() or ["no Shoal"])[-1]
    if said != here and (done.returncode == 0 or "PackageNotFoundError" in done.stderr):
        raise LaunchError(
            given=f"--python {python}",
            found=f"it has {said}, and this command is {here}",
            fix=f"install the same version with {python} -m pip, or leave --python out",
        )


def _problem(given: str, found: str, fix: str) -> LaunchError:
    return LaunchError(given=given, found=found, fix=fix)


def objections(request: JobRequest, site: Site, job: Job) -> Iterator[LaunchError]:
    """Yield all objections to a job, with the GPU-hours that it would waste."""
    partition = partition_of(request, site)
    if request.restarts and not job.requeue and job.chain == 1:
        yield _problem(
            f"--restarts {request.restarts}",
            f"a restart requeues the job, which {site.name} does not allow",
            "add --chain N: the next job of the chain resumes",
        )
    yield from _against_partition(request, site, partition)
    yield from _against_time(request, partition, job)
    yield from _against_processes(request, site, partition, job)
    if job.cpus is not None and request.workers > job.cpus:
        cost = _cost(request)
        yield _problem(
            f"{request.workers} loader workers for each process",
            f"a process has {job.cpus} core(s): workers share them, and {cost} wait for data",
            f"use at most {job.cpus} workers, or --cpus-per-task {request.workers}",
        )
    if request.memory is not None and not site.memory:
        yield _problem(
            f"--mem {request.memory}",
            f"{site.name} assigns memory by the number of cores and does not accept --mem",
            "use --cpus-per-task with more cores",
        )


def _against_partition(request: JobRequest, site: Site, partition: Partition) -> Iterator[LaunchError]:
    name = partition.name
    if site.partitions and name not in site.partitions:
        yield _problem(
            f"--partition {name}" if name else "no --partition",
            f"{site.name} has {', '.join(site.partitions)}",
            f"--partition {next(iter(site.partitions))}",
        )
    total = request.nodes * request.gpus
    if partition.gpus is not None and request.gpus > partition.gpus:
        better = (
            f"--nodes {ceil(total / partition.gpus)} --gpus-per-node {partition.gpus}"
            if partition.gpus
            else "another --partition"
        )
        yield _problem(
            f"--gpus-per-node {request.gpus}",
            f"a node of {name} has {partition.gpus} GPUs: "
            f"{site_scheduler(site).profile.title} would never start it",
            better,
        )
    if partition.nodes is not None and request.nodes > partition.nodes:
        yield _problem(
            f"--nodes {request.nodes}",
            f"a job in {name} has at most {partition.nodes} nodes",
            f"--nodes {partition.nodes}",
        )


def _against_time(request: JobRequest, partition: Partition, job: Job) -> Iterator[LaunchError]:
    gpus = request.nodes * request.gpus
    allowed = [qos for qos in partition.qos if request.qos in (None, qos.name)]
    given = f"--time {spell_time(request.time)}"
    times = [qos.time for qos in allowed if fits(qos, 0, gpus) and qos.time is not None]
    longest = max(times, default=partition.time) if allowed else partition.time
    if partition.time is not None and longest is not None:
        longest = min(longest, partition.time)
    if longest is not None and request.time > longest:
        parts = ceil(request.time / longest)
        yield _problem(
            given,
            f"{_kind(request, partition)} ends jobs after {spell_time(longest)}: {_cost(request)} "
            "are too many for one",
            f"--time {spell_time(longest)}{_afterwards(job, parts)}",
        )
    elif allowed and not any(fits(qos, request.time, gpus) for qos in allowed):
        most = max((qos.gpus or 0 for qos in allowed if fits(qos, request.time, 0)), default=0)
        yield _problem(
            f"{gpus} GPUs, {given}",
            f"{_kind(request, partition)} gives a job of this length at most {most} GPUs",
            f"request {most} GPUs in total, or less time",
        )
    if 2 * job.lead > request.time:
        yield _problem(
            given,
            f"{job.lead} s of it are kept for saving: {job.choices['lead'].reason}",
            f"--time {spell_time(60 * ceil(job.lead / 15))}, or more",
        )


def _afterwards(job: Job, parts: int) -> str:
    """Return how a job that needs several times its time resumes."""
    if job.turns:
        return ", and run the same command again for the rest"
    return ", after which it resumes automatically" if job.requeue else f" --chain {parts}"


def _against_processes(
    request: JobRequest, site: Site, partition: Partition, job: Job
) -> Iterator[LaunchError]:
    launcher = site_scheduler(site).profile.launchers[0]
    processes, gpus = processes_of(request), request.nodes * request.gpus
    if processes < request.nodes:
        yield _problem(
            f"-n {processes}, --nodes {request.nodes}",
            f"{request.nodes - processes} node(s) without a process",
            f"--nodes {processes}",
        )
    if gpus and processes != gpus:
        idle = gpus - processes
        found = (
            f"{gpus} GPUs reserved, {processes} used: {gpu_hours(idle, request.time)} of "
            f"{_cost(request)} are wasted"
            if idle > 0
            else f"{processes} processes share {gpus} GPUs, {_cost(request)}: NCCL can't do that"
        )
        yield _problem(f"-n {processes}, {gpus} GPUs", found, f"use -n {gpus}, or fewer GPUs")
    cores = (job.cpus or 1) * job.per_node
    if partition.cores is not None and cores > partition.cores:
        yield _problem(
            f"{job.per_node} process(es) on a node, --cpus-per-task {job.cpus or 1}",
            f"{cores} cores, and a node of {partition.name} has {partition.cores}",
            f"--cpus-per-task {max(1, partition.cores // job.per_node)}",
        )
    if job.launcher == "torchrun" and processes % request.nodes:
        yield _problem(
            f"-n {processes} with torchrun",
            f"{processes} processes can't be split equally over {request.nodes} nodes",
            f"-n {request.nodes * job.per_node}, or --launcher {launcher}",
        )
    if job.launcher == "torchrun" and request.sweep:
        yield _problem(
            "--sweep with torchrun",
            "Shoal reads from one run directory if ranks have saved, and each element has its own",
            f"--launcher {launcher}",
        )


def notes(request: JobRequest, site: Site, job: Job) -> Iterator[str]:
    """Yield notes about a job that users should know before it waits in the queue."""
    if not site.tried:
        yield f"the file of the site {site.name} is untested"
    if not site.partitions:
        yield f"this site ({site.name}) is unknown: GPUs, partitions and times are not checked"
    partition = partition_of(request, site)
    charged = _charged(request, site, partition, job)
    if charged > request.gpus:
        cost = gpu_hours(request.nodes * charged, request.time)
        yield f"counts as {charged} GPUs on each node, not {request.gpus}: up to {cost}"
    if job.qos is not None and request.qos is None:
        yield f"--qos={job.qos}: {job.choices['qos'].reason}"
    if not job.turns:
        yield f"signal to save {job.lead} s before its end: {job.choices['lead'].reason}"
    if not job.requeue and job.chain == 1 and not job.turns:
        yield "this site does not requeue: --chain N submits N jobs, each of which resumes the last"
    words = (*request.args, *(word for words in request.sweep for word in words))
    for secret in secret_options(words):
        yield f"{secret} and its value are in the job's files; pass secrets by environment variables"


def _charged(request: JobRequest, site: Site, partition: Partition, job: Job) -> int:
    """Return the number of GPUs per node that are accounted for: cores count as their GPUs."""
    if not request.gpus or partition.gpus is None:
        return request.gpus
    if site.whole_nodes and request.nodes > 1:
        return partition.gpus
    if partition.cores is None or job.cpus is None:
        return request.gpus
    share = partition.cores / partition.gpus
    return max(request.gpus, min(partition.gpus, ceil(job.cpus * job.per_node / share)))


def _kind(request: JobRequest, partition: Partition) -> str:
    return " ".join(filter(None, (partition.name, request.qos)))


def _cost(request: JobRequest) -> str:
    if request.gpus:
        return gpu_hours(request.nodes * request.gpus, request.time)
    return f"{request.nodes * request.time / 3600:.3g} node-hours"


def workers_of(source: str, args: Sequence[str]) -> int:
    """Return the number of loader workers that a script seems to start, by `num_workers=8` or an
    option.
    """
    found = [0]
    for index, word in enumerate(args):
        option, _, value = word.partition("=")
        if option in _WORKER_OPTIONS:
            value = value or (args[index + 1] if index + 1 < len(args) else "")
            found += [int(value)] if value.isdecimal() else []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return max(found)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "num_workers":
            value_node = node.value
            if isinstance(value_node, ast.Constant) and type(value_node.value) is int:
                found.append(value_node.value)
    return max(found)


def secret_options(args: Sequence[str]) -> list[str]:
    """Return the options in a command whose names suggest secrets."""
    options = [word.partition("=")[0] for word in args if re.match(r"--?\w", word)]
    return [option for option in dict.fromkeys(options) if is_secret(option.lstrip("-"))]


def without_secrets(args: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of such options masked."""
    secret = set(secret_options(args))
    words = []
    for before, word in zip(("", *args), args, strict=False):
        option, equals, _ = word.partition("=")
        if before in secret and not word.startswith("-"):
            words.append(MASK)
        elif equals and option in secret:
            words.append(f"{option}={MASK}")
        else:
            words.append(str(masked(word)))
    return words
