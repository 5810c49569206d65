"""The batch script as text: a pure function of a job and of where things lie."""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from jinja2 import Environment, StrictUndefined

from shoal.distributed.cluster_env import REQUEUE
from shoal.launcher.submit.job import Job, Turn
from shoal.launcher.submit.site import Site
from shoal.launcher.submit.times import spell_time
from shoal.telemetry.events import path_of
from shoal.util.errors import LaunchError

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")
_FIRST_PORT, _PORTS = 10001, 10000
MARK = "# Written by `shoal submit`"
"""What batch scripts are known by."""


class Shell(str):
    """Text that is shell already. All else that a template is given becomes one quoted word."""


_KEEPING = (Shell('"$around"'), Shell('"$first"'))


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """Where a job runs and what: absolute paths, the words of the command, variables to set.

    `folder` is the job's own, `directory` the one that the script runs in, `run` the run directory,
    `stage` are what each node gets a copy of.
    """

    folder: str
    directory: str
    run: str
    script: str
    args: tuple[str, ...]
    sweep: tuple[tuple[str, ...], ...]
    python: str
    image: str | None
    python_path: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def render(job: Job, site: Site, place: JobContext) -> str:
    """The batch script. Whatever was typed stands in it as one quoted word.

    Raises LaunchError where a value can't stand in a line that sbatch reads.
    """
    environment = Environment(
        finalize=_word,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # that is for HTML; _word quotes for shells
    )
    template = resources.files(__package__).joinpath("job.sh.jinja").read_text()
    # What ranks print is in the log when they do, and not lost when they are killed.
    unbuffered = Shell("${PYTHONUNBUFFERED-1}")
    variables: list[tuple[str, str]] = [("PYTHONUNBUFFERED", unbuffered), *place.variables]
    if place.python_path:
        variables.append(("PYTHONPATH", _python_path(place)))
    if site.ports is not None:
        variables.append(("SHOAL_PORTS", Shell(f"${{SHOAL_PORTS:-{site.ports}}}")))
    text = environment.from_string(template).render(
        mark=Shell(MARK),
        site=Shell(re.sub(r"\W", "-", site.name)),
        directives=[Shell(line) for line in _directives(job, place)],
        folder=place.folder,
        directory=place.directory,
        setup=[Shell(line) for line in site.setup],
        variables=[(Shell(name), value) for name, value in variables],
        chain=job.chain,
        requeue=job.requeue,
        requeues=job.requeues,
        requeue_code=REQUEUE,
        restarts=job.restarts,
        launcher=Shell(job.launcher),
        processes=job.processes,
        launch=Shell(_launch(job, site)),
        events=str(path_of(place.run, 0)),
        local=Shell(site.local),
        stage=[os.path.split(path) for path in place.stage],
        program=_words(_around(job, _program(job, site, place))),
        turns=[(turn.log, _turn(turn, job, site, place)) for turn in job.turns],
        limit=job.limit,
        sweep=[_words(_staged(word, place) for word in words) for words in place.sweep],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _word(value: object) -> str:
    if isinstance(value, Shell):
        return value
    # Quoted lines are bash's $'\n', so that no line of the script begins with what was typed.
    return shlex.quote(str(value)).replace("\n", "'$'\\n''")


def _words(words: Iterable[str]) -> Shell:
    return Shell(" ".join(_word(word) for word in words))


def _python_path(place: JobContext) -> Shell:
    own = ":".join(place.python_path)
    return Shell(f"{shlex.quote(own)}${{PYTHONPATH:+:$PYTHONPATH}}")


def _directives(job: Job, place: JobContext) -> Iterator[str]:
    """What sbatch reads. It takes a line apart as a shell does, but for what a `$` means."""
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
        yield _option("gres", f"{job.gres}:{job.gpus}")
    cpus = _cpus_per_task(job)
    if cpus is not None:
        yield _option("cpus-per-task", cpus)
    if job.hint is not None:
        yield _option("hint", job.hint)
    if job.memory is not None:
        yield _option("mem", job.memory)
    yield _option("time", spell_time(job.time))
    if job.elements:
        at_once = "" if job.at_once is None else f"%{job.at_once}"
        yield _option("array", f"0-{job.elements - 1}{at_once}")
    if not job.turns:  # which save nothing, and may use all of the time
        yield _option("signal", f"{'B:' if job.to_batch else ''}{job.signal}@{job.lead}")
    yield "--requeue" if job.requeue else "--no-requeue"
    yield "--open-mode=append"
    # A percent sign begins what Slurm puts in; two are one.
    log = f"{place.folder}/log".replace("%", "%%")
    yield _option("output", log + ("-%a.txt" if job.elements else ".txt"))
    for option in job.options:
        yield _given_option(option)


def _option(name: str, value: object) -> str:
    text = str(value)
    if _UNPRINTABLE.search(text) or "\\" in text:
        raise LaunchError(
            given=f"--{name} {text!r}",
            found="a control character, or a backslash, which sbatch reads otherwise than shells do",
            fix="--run DIR with a plainer name" if name == "output" else "leave it out",
        )
    return f"--{name}={_word(text)}"


def _given_option(option: str) -> str:
    found = re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?", option, re.DOTALL)
    if found is None:
        raise LaunchError(
            given=f"--sbatch {option!r}",
            found="not an option as sbatch spells them in full",
            fix="--sbatch=--exclude=node01, with two dashes and an equals sign",
        )
    return f"--{found[1]}" if found[2] is None else _option(found[1], found[2])


def _cpus_per_task(job: Job) -> int | None:
    if job.cpus is None or job.launcher != "torchrun":
        return job.cpus
    return job.cpus * job.per_node


def _turn(turn: Turn, job: Job, site: Site, place: JobContext) -> Shell:
    """The command of a turn: a step of the job with as many processes on each of its nodes."""
    own = replace(job, processes=turn.processes, per_node=turn.processes // job.nodes)
    launch = _launch(own, site)
    if job.launcher == "srun":
        launch += f" --nodes={own.nodes} --ntasks={own.processes} --ntasks-per-node={own.per_node}"
    program = _program(own, site, replace(place, args=(*place.args, *turn.args)))
    return _words([Shell(launch), *_around(job, program)])


def _launch(job: Job, site: Site) -> str:
    """What starts the program once for each process; torchrun does so on each node."""
    if job.launcher == "mpirun":
        return f"{_words(site.mpirun)} -n {job.processes}"
    # Since Slurm 22.05 srun takes no number of cores from the job. A task that fails ends the others.
    cpus = _cpus_per_task(job)
    cores = "" if cpus is None else f" --cpus-per-task={cpus}"
    return f"srun --kill-on-bad-exit=1{cores}"


def _around(job: Job, program: Sequence[str]) -> Sequence[str]:
    """The program of each rank, or agent of torchrun's, in the shell that keeps its exit code."""
    return ["bash", "-c", *_KEEPING, *program]


def _program(job: Job, site: Site, place: JobContext) -> Sequence[str]:
    words: list[str] = []
    if place.image is not None:
        words += [*site.container]
        for path in dict.fromkeys((place.directory, place.folder)):
            words += ["--bind", path]
        words += ["--bind", Shell('"$staged"')] if place.stage else []
        words += [place.image]
    words += [_staged(place.python, place)]
    if job.launcher == "torchrun":
        # Ports of jobs that share a node differ by the number of the job.
        port = Shell(f'"$host:$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"')
        words += ["-m", "torch.distributed.run", f"--nnodes={job.nodes}"]
        words += [f"--nproc-per-node={job.per_node}", "--rdzv-backend=c10d"]
        # Without the dashes torchrun takes options of the script for abbreviations of its own.
        words += ["--rdzv-id", Shell('"$job"'), "--rdzv-endpoint", port, "--"]
    return [*words, place.script, *(_staged(word, place) for word in place.args)]


def _staged(word: str, place: JobContext) -> str:
    """A word of the command, or the value of an option, that names what is staged means the copy."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = os.path.normpath(os.path.join(place.directory, value))
    for whole in place.stage:
        if value and (path == whole or path.startswith(f"{whole}/")):
            within = os.path.relpath(path, os.path.dirname(whole))
            return Shell(
                f'{shlex.quote(option + equals) if option else ""}"$staged"/{shlex.quote(within)}'
            )
    return word
