"""Which configurations a study has, and in which order they run. Functions of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.bench.scaling.subject import SIZES, ScriptSubject, Subject, parse_subject
from shoal.util.errors import LaunchError
from shoal.util.units import counted

SCALINGS = ("strong", "weak")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
STRATEGIES = ("ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = ("eager", "script", "inductor")
NONE = "none"
"""The backend and the strategy of one process, which needs neither."""


@dataclass(frozen=True, kw_only=True, order=True)
class ScalingCurve:
    """What stays the same while the number of processes grows."""

    scaling: str
    backend: str
    strategy: str
    precision: str
    way: str

    def __str__(self) -> str:
        return ", ".join(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one job runs; `batch` is the global one."""

    processes: int
    batch: int
    backend: str
    strategy: str
    precision: str
    way: str

    @property
    def key(self) -> str:
        """A name that may be a directory's."""
        parts = (f"n{self.processes}", f"b{self.batch}", self.backend, self.strategy)
        return "-".join((*parts, self.precision, self.way))

    def __str__(self) -> str:
        rest = (self.backend, self.strategy, self.precision, self.way)
        chosen = ", ".join(part for part in rest if part != NONE)
        return f"{counted(self.processes, 'process', 'es')}, batch {self.batch}, {chosen}"


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What was asked for. `batch` is the global batch, of weak scaling that of each process.

    A job takes `warmup` steps and then `steps` that count; each configuration has `rounds` jobs. A job
    that takes longer than `limit` seconds is ended. `threads` are those of each process, 0 where
    PyTorch is left to choose.
    """

    model: str
    args: tuple[str, ...] = ()
    processes: tuple[int, ...] = (1, 2)
    scalings: tuple[str, ...] = ("strong",)
    backends: tuple[str, ...] = ("auto",)
    strategies: tuple[str, ...] = ("ddp",)
    precisions: tuple[str, ...] = ("fp32",)
    ways: tuple[str, ...] = ("eager",)
    batch: int = 64
    steps: int = 30
    warmup: int = 10
    rounds: int = 3
    threads: int = 1
    limit: float = 600.0

    @property
    def subject(self) -> Subject:
        """The model, read."""
        return parse_subject(self.model)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def options_from(plain: dict[str, Any]) -> StudyOptions:
    """What `StudyOptions.plain` was made of."""
    read: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return StudyOptions(**read)


def check_study_options(options: StudyOptions) -> None:
    """Raises LaunchError for what can't be studied."""
    _check_script(options)
    for option, given, known in (
        ("--scaling", options.scalings, SCALINGS),
        ("--backends", options.backends, BACKENDS),
        ("--strategies", options.strategies, STRATEGIES),
        ("--precisions", options.precisions, PRECISIONS),
        ("--ways", options.ways, WAYS),
    ):
        for each in given:
            if each not in known:
                raise LaunchError(
                    given=f"{option} {','.join(given)}",
                    found=f"{each!r} is none of {', '.join(known)}",
                    fix=f"{option} {known[0]}, or several: {option} {','.join(known[:2])}",
                )
    if min(options.processes, default=0) < 1:
        raise LaunchError(
            given=f"-n {','.join(map(str, options.processes))}",
            found="numbers of processes are 1 or more",
            fix="-n 1,2,4",
        )
    for option, count, least in (
        ("--batch", options.batch, max(options.processes) if "strong" in options.scalings else 1),
        ("--steps", options.steps, 2),
        ("--warmup", options.warmup, 1),
        ("--rounds", options.rounds, 1),
    ):
        if count < least:
            raise LaunchError(
                given=f"{option} {count}", found=f"it is {least} or more here", fix=f"{option} {least}"
            )


PLACES = ("batch", "processes", "backend", "strategy", "precision", "way", "steps", "run")


def _check_script(options: StudyOptions) -> None:
    """A script is told by its arguments what a configuration is."""
    text = " ".join(options.args)
    if not isinstance(options.subject, ScriptSubject):
        if options.args:
            raise LaunchError(
                given=f"{options.model} -- {text}",
                found="arguments, and only a script takes any",
                fix=f"shoal bench scaling {options.model}",
            )
        return
    if not Path(options.model).is_file():
        raise LaunchError(
            given=options.model,
            found=f"there is no file {Path(options.model).absolute()}",
            fix="the path of a script, or one of " + ", ".join(SIZES),
        )
    varied = {
        "run": True,
        "batch": "weak" in options.scalings,
        "backend": len(options.backends) > 1 and set(options.backends) != {"auto", "mpi"},
        "strategy": len(options.strategies) > 1,
        "precision": len(options.precisions) > 1,
        "way": len(options.ways) > 1,
    }
    for name, needed in varied.items():
        if needed and f"{{{name}}}" not in text:
            raise LaunchError(
                given=f"{options.model} -- {text}",
                found=f"nothing tells the script its {name}, which the study chooses",
                fix=f"{options.model} -- {text} --{name} {{{name}}}".replace("--  ", "-- "),
            )


def fill_arguments(options: StudyOptions, configuration: Configuration, run: str) -> list[str]:
    """The arguments of a script in this configuration: `{batch}` and others in their places."""
    values = {
        **{name: str(value) for name, value in asdict(configuration).items()},
        "steps": str(options.warmup + options.steps),
        "run": run,
    }
    found = []
    for argument in options.args:
        for name in PLACES:
            argument = argument.replace(f"{{{name}}}", values[name])  # noqa: PLW2901
        found.append(argument)
    return found


def list_curves(options: StudyOptions) -> list[ScalingCurve]:
    """All that a study compares, in the order of the options."""
    return [
        ScalingCurve(scaling=scaling, backend=backend, strategy=strategy, precision=precision, way=way)
        for scaling in options.scalings
        for strategy in options.strategies
        for precision in options.precisions
        for way in options.ways
        for backend in options.backends
    ]


def make_configuration(options: StudyOptions, curve: ScalingCurve, processes: int) -> Configuration:
    """The job of a curve at so many processes. One process of ours is the same for all backends."""
    alone = processes == 1 and not isinstance(options.subject, ScriptSubject)
    return Configuration(
        processes=processes,
        batch=options.batch * (processes if curve.scaling == "weak" else 1),
        backend=NONE if alone else curve.backend,
        strategy=NONE if alone else curve.strategy,
        precision=curve.precision,
        way=curve.way,
    )


def list_configurations(options: StudyOptions) -> list[Configuration]:
    """The jobs of a round, each once."""
    found = {
        make_configuration(options, curve, processes): None
        for processes in sorted(set(options.processes))
        for curve in list_curves(options)
    }
    return list(found)


def round_order(count: int, number: int) -> list[int]:
    """In which order round `number` takes `count` configurations, so that drift cancels.

    Each second round is the one before it backwards: over the two every configuration stands at the
    same place on average, so what drifts evenly is the same for all. Pairs begin elsewhere in turn,
    since the first job of a round has the caches of the last of another.
    """
    start = number // 2 % max(1, count)
    turned = [(start + place) % count for place in range(count)]
    return turned[::-1] if number % 2 else turned


def threads_for(processes: Sequence[int], cores: int) -> int:
    """As many for each process as it can have at the largest size: else one process has them all."""
    return max(1, cores // max(processes))
