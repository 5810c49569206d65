"""The options of a scaling study: its model, its configurations and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from shoal.tools.bench.options import fill_places
from shoal.util.arguments import check_choice, check_file, check_integer
from shoal.util.errors import LaunchError
from shoal.util.units import counted

IMAGE = {"size": 224, "classes": 1000}
SIZES: Mapping[str, Mapping[str, int]] = {
    "dense": {"width": 512, "layers": 3, "inputs": 784, "classes": 10},
    "resnet-small": {"size": 32, "width": 16, "blocks": 2, "classes": 10},
    "resnet18": IMAGE,
    "resnet50": IMAGE,
    "resnet101": IMAGE,
    "gpt": {"layers": 4, "width": 128, "heads": 4, "context": 128, "words": 256},
}
"""The built-in models with their default sizes."""


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """One of Shoal's built-in models, with all its sizes."""

    name: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        usual = SIZES[self.name]
        given = ",".join(f"{name}={n}" for name, n in self.sizes.items() if usual[name] != n)
        return f"{self.name}:{given}" if given else self.name


@dataclass(frozen=True, kw_only=True)
class Factory:
    """A function `module:name` that returns (model, task, dataset) when it is called."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class ScriptSubject:
    """A script of the user."""

    path: str

    def __str__(self) -> str:
        return self.path


Subject: TypeAlias = BuiltIn | Factory | ScriptSubject


def parse_subject(text: str) -> Subject:
    """Return the subject that `text` describes, which need not exist. Raises LaunchError for others."""
    if text.endswith(".py"):
        return ScriptSubject(path=text)
    name, colon, rest = text.partition(":")
    if name in SIZES:
        return BuiltIn(name=name, sizes={**SIZES[name], **_sizes(name, rest if colon else "")})
    module = name.split(".")
    if colon and rest.isidentifier() and all(part.isidentifier() for part in module):
        return Factory(module=name, name=rest)
    raise LaunchError(
        given=text,
        found="neither a built-in model, nor module:function, nor a script",
        fix=f"use one of {', '.join(SIZES)}; package.module:function; or train.py",
    )


def throughput_unit(subject: Subject) -> tuple[str, int]:
    """Return the unit of throughput, and the number of units per sample."""
    if isinstance(subject, BuiltIn):
        if subject.name == "gpt":
            return "tokens", subject.sizes["context"]
        if subject.name.startswith("resnet"):
            return "images", 1
    return "samples", 1


def _sizes(name: str, text: str) -> dict[str, int]:
    found = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in SIZES[name] or not value.isdecimal() or int(value) < 1:
            usual = ",".join(f"{size}={number}" for size, number in SIZES[name].items())
            raise LaunchError(
                given=f"{name}:{text}",
                found=f"{part!r} is not one of its sizes, or not a number above 0",
                fix=f"use {name}:{usual}, or some of these",
            )
        found[key] = int(value)
    if name == "gpt" and (shape := {**SIZES[name], **found})["width"] % shape["heads"]:
        width, heads = shape["width"], shape["heads"]
        raise LaunchError(
            given=f"{name}:{text}",
            found=f"the width {width} is not divisible by {heads} heads",
            fix=f"gpt:width={width},heads={max(n for n in range(1, heads + 1) if not width % n)}",
        )
    return found


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
