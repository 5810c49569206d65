"""The options of sbatch in a batch script, and the commands that start its processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.tools.submit.job import Job
from shoal.tools.submit.scheduler import quote_word
from shoal.tools.submit.times import spell_time
from shoal.util.errors import LaunchError

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


def options(job: Job, folder: str) -> Iterator[str]:
    """Yield options for sbatch, which splits a line as a shell does, but reads a `$` literally."""
    yield _option("job-name", job.name)
    for name, value in (
        ("account", job.account),
        ("partition", job.partition),
        ("constraint", job.constraint),
        ("qos", job.qos),
    ):
        if value is not None:
            yield _option(name, value)
    yield _option("nodes", job.nodes)
    torchrun = job.launcher == "torchrun"
    each = 1 if torchrun else job.per_node
    if not torchrun and job.processes != job.nodes * each:
        yield _option("ntasks", job.processes)
    yield _option("ntasks-per-node", each)
    if job.gpus:
        yield _option("gres", f"{job.gpu_resource or 'gpu'}:{job.gpus}")
    cpus = _cpus_per_task(job)
    if cpus is not None:
        yield _option("cpus-per-task", cpus)
    if not job.multithread:
        yield _option("hint", "nomultithread")
    if job.memory is not None:
        yield _option("mem", job.memory)
    yield _option("time", spell_time(job.time))
    if job.elements:
        at_once = "" if job.at_once is None else f"%{job.at_once}"
        yield _option("array", f"0-{job.elements - 1}{at_once}")
    if not job.turns:  # turns do not save, and may use all of the time
        yield _option("signal", f"{'B:' if job.to_batch else ''}{job.signal}@{job.lead}")
    yield "--requeue" if job.requeue else "--no-requeue"
    yield "--open-mode=append"
    # Slurm replaces patterns that begin with a percent sign; two of them are one.
    log = f"{folder}/log".replace("%", "%%")
    yield _option("output", log + ("-%a.txt" if job.elements else ".txt"))
    for option in job.options:
        yield _given_option(option)


def launch_command(job: Job, *, step: bool) -> str:
    """Return srun with its options for a job, or for a step with fewer processes."""
    # Since Slurm 22.05, srun does not inherit the number of cores. A task that fails ends the others.
    cpus = _cpus_per_task(job)
    command = "srun --kill-on-bad-exit=1" + ("" if cpus is None else f" --cpus-per-task={cpus}")
    if step and job.launcher == "srun":
        command += f" --nodes={job.nodes} --ntasks={job.processes} --ntasks-per-node={job.per_node}"
    return command


def _option(name: str, value: object) -> str:
    text = str(value)
    if _UNPRINTABLE.search(text) or "\\" in text:
        raise LaunchError(
            given=f"--{name} {text!r}",
            found="a control character, or a backslash, which sbatch and shells read differently",
            fix="use --run DIR with a simpler name" if name == "output" else "leave it out",
        )
    return f"--{name}={quote_word(text)}"


def _given_option(option: str) -> str:
    found = re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?", option, re.DOTALL)
    if found is None:
        raise LaunchError(
            given=f"--directive {option!r}",
            found="it is not a long option of sbatch",
            fix="write --directive=--exclude=node01, with two dashes and an equals sign",
        )
    return f"--{found[1]}" if found[2] is None else _option(found[1], found[2])


def _cpus_per_task(job: Job) -> int | None:
    if job.cpus is None or job.launcher != "torchrun":
        return job.cpus
    return job.cpus * job.per_node
