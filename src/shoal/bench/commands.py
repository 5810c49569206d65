"""The commands `shoal bench …`: options in, results out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.errors import LaunchError

from . import machine_commands

if TYPE_CHECKING:
    from .grid import Options

benches = typer.Typer(
    name="bench",
    help="Measure: how a model scales; collectives, input, ways to compute.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@benches.callback()
def bench() -> None:
    """Measure what this machine gives."""


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="dense, resnet-small, resnet18, resnet50, resnet101 or gpt, with sizes as in "
        "gpt:layers=8,width=512; module:function; or SCRIPT.py.",
    ),
]
_Args = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS]",
        help="Of a script, with {run}, {batch}, {steps}, {backend} … where a job's own go.",
    ),
]
_Processes = Annotated[
    str, typer.Option("-n", "--processes", metavar="LIST", help="Numbers of processes, as in 1,2,4.")
]
_Scaling = Annotated[
    str, typer.Option(metavar="LIST", help="strong (one batch, divided), weak (a batch for each).")
]
_Backends = Annotated[str, typer.Option(metavar="LIST", help="auto, gloo, nccl, mpi.")]
_Strategies = Annotated[str, typer.Option(metavar="LIST", help="ddp, fsdp.")]
_Precisions = Annotated[str, typer.Option(metavar="LIST", help="fp32, bf16, fp16.")]
_Ways = Annotated[str, typer.Option(metavar="LIST", help="eager, script, inductor.")]
_Batch = Annotated[
    int, typer.Option(metavar="N", help="Samples of a step: of all processes, where weak of each.")
]
_Steps = Annotated[int, typer.Option(metavar="N", help="Steps of a job that count.")]
_Warmup = Annotated[int, typer.Option(metavar="N", help="Steps before these.")]
_Rounds = Annotated[int, typer.Option(metavar="N", help="Jobs of each configuration.")]
_Threads = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Of each process; else cores by the most processes. 0: any."),
]
_Limit = Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="How long a job may take.")]
_Study = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where results are kept; else studies/MODEL.")
]
_Mpirun = Annotated[
    str | None, typer.Option(metavar="COMMAND", help="What starts ranks of MPI, with its options.")
]


@benches.command(context_settings={"allow_interspersed_args": True})
def scaling(
    *,
    model: _Model,
    args: _Args = None,
    processes: _Processes = "1,2",
    scaling: _Scaling = "strong",
    backends: _Backends = "auto",
    strategies: _Strategies = "ddp",
    precisions: _Precisions = "fp32",
    ways: _Ways = "eager",
    batch: _Batch = 64,
    steps: _Steps = 30,
    warmup: _Warmup = 10,
    rounds: _Rounds = 3,
    threads: _Threads = None,
    limit: _Limit = 600.0,
    study: _Study = None,
    mpirun: _Mpirun = None,
) -> None:
    """Train a model on 1, 2, 4 … processes and say what more of them give, and why not more.

    Each configuration is a job of its own, several times, in an order that changes. What has
    succeeded in the study's directory is not run again.
    """
    from shoal.tables import plain_console, print_line

    from . import scaling as studies
    from .grid import Options, threads_for

    counts = _numbers(processes, "-n")
    cores = len(os.sched_getaffinity(0))
    options = Options(
        model=model,
        args=tuple(args or ()),
        processes=counts,
        scalings=_words(scaling),
        backends=_words(backends),
        strategies=_words(strategies),
        precisions=_words(precisions),
        ways=_words(ways),
        batch=batch,
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        threads=threads_for(counts, cores) if threads is None else threads,
        limit=limit,
    )
    console = plain_console()
    folder = study or Path("studies") / _folder(options)
    done = studies.run(folder, options, mpirun, lambda line: print_line(console, line))
    console.print()
    studies.show(done, console)
    if not any(repeat.measured for repeat in done.repeats()):
        raise typer.Exit(1)


_First = Annotated[Path, typer.Argument(metavar="A", help="A study's directory.")]
_Second = Annotated[Path, typer.Argument(metavar="B", help="Another one's.")]
_Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Where the page goes; else B/beside-A."),
]


@benches.command()
def compare(first: _First, second: _Second, *, out: _Out = None) -> None:
    """Lay two studies of one model beside each other: what B gives of A, and in which part."""
    from shoal.tables import plain_console

    from . import scaling as studies
    from .folder import load

    one, other = load(first), load(second)
    folder = out or second / f"beside-{first.resolve().name}"
    studies.compare(one, other, folder, plain_console())


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise LaunchError(
            given=f"{option} {text}",
            found="not numbers above 0 with commas between them",
            fix=f"{option} 1,2,4",
        )
    return tuple(sorted(int(word) for word in words))


def _folder(options: Options) -> str:
    """A directory's name for the model: `gpt:layers=8` is `gpt-layers=8`, `a/train.py` is `train`."""
    name = Path(options.model).stem if options.model.endswith(".py") else options.model
    return "".join(sign if sign.isalnum() or sign in "=-_." else "-" for sign in name)


for command in (machine_commands.comm, machine_commands.data, machine_commands.modes):
    benches.command()(command)
