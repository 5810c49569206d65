"""The configurations of a study and their order. Functions of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.tools.bench.options import fill_places
from shoal.tools.bench.scaling.subject import SIZES, ScriptSubject, Subject, parse_subject
from shoal.util.arguments import check_choice, check_file, check_integer
from shoal.util.errors import LaunchError
from shoal.util.units import counted

SCALINGS = ("strong", "weak")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
STRATEGIES = ("ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16")
WAYS = ("eager", "script", "inductor")
NONE = "none"
"""The backend and the strategy of a single process, which needs neither."""


@dataclass(frozen=True, kw_only=True, order=True)
class ScalingCurve:
    """The options of a curve that are constant while the number of processes grows."""

    scaling: str
    backend: str
    strategy: str
    precision: str
    way: str

    def __str__(self) -> str:
        return ", ".join(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The configuration of one job; `batch` is the global batch."""

    processes: int
    batch: int
    backend: str
    strategy: str
    precision: str
    way: str

    @property
    def key(self) -> str:
        """A name that is valid for a directory."""
        parts = (f"n{self.processes}", f"b{self.batch}", self.backend, self.strategy)
        return "-".join((*parts, self.precision, self.way))

    def __str__(self) -> str:
        rest = (self.backend, self.strategy, self.precision, self.way)
        chosen = ", ".join(part for part in rest if part != NONE)
        return f"{counted(self.processes, 'process', 'es')}, batch {self.batch}, {chosen}"


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of a study. `batch` is the global batch size; for weak scaling, the batch size of
    each process.

    A job takes `warmup` steps and then `steps` that count; each configuration has `rounds` jobs. A job
    that takes longer than `limit` seconds is ended. `threads` is the number per process; 0 is PyTorch's
    default.
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
        """The parsed model."""
        return parse_subject(self.model)


def check_study_options(options: StudyOptions) -> None:
    """Raise LaunchError for invalid options."""
    _check_script(options)
    for option, given, known in (
        ("--scaling", options.scalings, SCALINGS),
        ("--backends", options.backends, BACKENDS),
        ("--strategies", options.strategies, STRATEGIES),
        ("--precisions", options.precisions, PRECISIONS),
        ("--ways", options.ways, WAYS),
    ):
        for each in given or ("",):
            check_choice(LaunchError, "shoal bench scaling", option, each, known)
    if min(options.processes, default=0) < 1:
        raise LaunchError(
            given=f"-n {','.join(map(str, options.processes))}",
            found="numbers of processes must be 1 or more",
            fix="-n 1,2,4",
        )
    for option, count, least in (
        ("--batch", options.batch, max(options.processes) if "strong" in options.scalings else 1),
        ("--steps", options.steps, 2),
        ("--warmup", options.warmup, 1),
        ("--rounds", options.rounds, 1),
    ):
        check_integer(LaunchError, "shoal bench scaling", option, count, least)


def _check_script(options: StudyOptions) -> None:
    """Raise LaunchError unless the script's arguments have placeholders for the configuration."""
    text = " ".join(options.args)
    if not isinstance(options.subject, ScriptSubject):
        if options.args:
            raise LaunchError(
                given=f"{options.model} -- {text}",
                found="only a script accepts arguments",
                fix=f"shoal bench scaling {options.model}",
            )
        return
    check_file(
        LaunchError,
        options.model,
        options.model,
        fix=f"use the path of a script, or one of {', '.join(SIZES)}",
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
                found=f"the benchmark varies the {name}, but no argument passes it to the script",
                fix=f"{options.model} -- {text} --{name} {{{name}}}".replace("--  ", "-- "),
            )


def fill_arguments(options: StudyOptions, configuration: Configuration, run: str) -> list[str]:
    """Return a script's arguments for this configuration, with `{batch}` and others filled in."""
    values = {
        **{name: str(value) for name, value in asdict(configuration).items()},
        "steps": str(options.warmup + options.steps),
        "run": run,
    }
    return fill_places(options.args, values)


def list_curves(options: StudyOptions) -> list[ScalingCurve]:
    """Return all curves of a study, in the order of the options."""
    return [
        ScalingCurve(scaling=scaling, backend=backend, strategy=strategy, precision=precision, way=way)
        for scaling in options.scalings
        for strategy in options.strategies
        for precision in options.precisions
        for way in options.ways
        for backend in options.backends
    ]


def make_configuration(options: StudyOptions, curve: ScalingCurve, processes: int) -> Configuration:
    """Return the job of a curve with `processes`. A single process is the same for all backends."""
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
    """Return the jobs of a round, each once."""
    found = {
        make_configuration(options, curve, processes): None
        for processes in sorted(set(options.processes))
        for curve in list_curves(options)
    }
    return list(found)


def round_order(count: int, number: int) -> list[int]:
    """Return the order in which round `number` runs `count` configurations, so that drift cancels.

    Each second round reverses the one before it. Over the two, every configuration has the same mean
    position, so linear drift is the same for all. Pairs start at different configurations in turn,
    since the first job of a round has the caches of the last of another.
    """
    start = number // 2 % max(1, count)
    turned = [(start + place) % count for place in range(count)]
    return turned[::-1] if number % 2 else turned


def threads_for(processes: Sequence[int], cores: int) -> int:
    """Return the threads that each process can have at the largest size, the same for all sizes."""
    return max(1, cores // max(processes))
