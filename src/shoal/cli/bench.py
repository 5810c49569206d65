"""The commands `shoal bench …`: options in, results out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import bench_machine
from shoal.cli.submit_options import Account, Cpus, Directive, Force, Partition, Qos, Site
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.bench.scaling.allocations import ClusterRequest
    from shoal.bench.scaling.configurations import StudyOptions

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
_Submit = Annotated[bool, typer.Option("--submit", help="As jobs of a cluster; all below need it.")]
_Time = Annotated[
    str | None, typer.Option(metavar="HH:MM:SS", help="Of each job; else as its limits add up.")
]
_Gpus = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="GPUs of a node, else the site's; 0 for none.")
]
_Tasks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Processes of a node; else its GPUs or cores."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts, no more.")]


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
    submit: _Submit = False,
    site: Site = None,
    partition: Partition = None,
    qos: Qos = None,
    account: Account = None,
    time: _Time = None,
    gpus_per_node: _Gpus = None,
    tasks_per_node: _Tasks = None,
    cpus_per_task: Cpus = None,
    directive: Directive = None,
    dry_run: _DryRun = False,
    force: Force = False,
) -> None:
    """Train a model on 1, 2, 4 … processes and say what more of them give, and why not more.

    Each configuration is a job of its own, several times, in an order that changes. What has
    succeeded in the study's directory is not run again.
    """
    from shoal.bench.scaling import allocations, configurations

    options = configurations.StudyOptions(
        model=model,
        args=tuple(args or ()),
        processes=_numbers(processes, "-n"),
        scalings=_words(scaling),
        backends=_words(backends),
        strategies=_words(strategies),
        precisions=_words(precisions),
        ways=_words(ways),
        batch=batch,
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        limit=limit,
    )
    asked = allocations.ClusterRequest(
        site=site,
        partition=partition,
        account=account,
        qos=qos,
        time=_seconds(time),
        gpus=gpus_per_node,
        tasks=tasks_per_node,
        cpus=cpus_per_task,
        options=tuple(directive or ()),
        force=force,
    )
    if submit:
        _submit(study, options, threads, asked, dry=dry_run)
    else:
        _require_local(model, asked, dry=dry_run)
        _run(study, options, threads, mpirun)


def _run(given: Path | None, options: StudyOptions, threads: int | None, mpirun: str | None) -> None:
    from shoal.bench.scaling import study as studies
    from shoal.bench.scaling.configurations import threads_for
    from shoal.util.tables import plain_console, print_line

    if threads is None:
        threads = threads_for(options.processes, len(os.sched_getaffinity(0)))
    console = plain_console()
    options = replace(options, threads=threads)
    folder = _directory(given, options)
    done = studies.run_study(folder, options, mpirun, lambda line: print_line(console, line))
    console.print()
    studies.print_study(done, console)
    if not any(repeat.measured for repeat in done.repeats()):
        raise typer.Exit(1)


def _submit(
    given: Path | None,
    options: StudyOptions,
    threads: int | None,
    asked: ClusterRequest,
    *,
    dry: bool,
) -> None:
    from shoal.bench.scaling import study as studies
    from shoal.bench.scaling.allocations import node_capacity
    from shoal.launcher.submit.site_catalog import choose
    from shoal.util.tables import plain_console

    site = choose(asked.site).value
    if threads is None:  # as many as it has cores
        threads = node_capacity(site, asked).cpus or 1
    folder, options = _directory(given, options), replace(options, threads=threads)
    if dry:
        studies.print_planned_jobs(folder, options, asked, site)
    elif not studies.submit_study(folder, options, asked, site, plain_console()):
        raise typer.Exit(1)


def _require_local(model: str, asked: ClusterRequest, *, dry: bool) -> None:
    """Raise LaunchError for options of jobs where none is submitted."""
    from shoal.bench.scaling.allocations import ClusterRequest

    if asked != ClusterRequest() or dry:
        raise LaunchError(
            given=f"shoal bench scaling {model}, with options for a cluster",
            found="no --submit: the study would run here",
            fix="--submit, or leave out --site, --partition and those after them in --help",
        )


_Directory = Annotated[Path, typer.Argument(metavar="STUDY", help="A study's directory.")]


@benches.command()
def collect(study: _Directory) -> None:
    """Show what a submitted study came to so far; exit with 1 while results are missing.

    Names what still waits, runs or has ended without a result, with the command that tells more.
    """
    from shoal.bench.scaling import study as studies
    from shoal.bench.scaling.directory import load_study
    from shoal.util.tables import plain_console

    raise typer.Exit(int(not studies.collect_study(load_study(study), plain_console())))


_First = Annotated[Path, typer.Argument(metavar="A", help="A study's directory.")]
_Second = Annotated[Path, typer.Argument(metavar="B", help="Another one's.")]
_Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Where the page goes; else B/beside-A."),
]


@benches.command()
def compare(first: _First, second: _Second, *, out: _Out = None) -> None:
    """Lay two studies of one model beside each other: what B gives of A, and in which part."""
    from shoal.bench.scaling import study as studies
    from shoal.bench.scaling.directory import load_study
    from shoal.util.tables import plain_console

    one, other = load_study(first), load_study(second)
    folder = out or second / f"beside-{first.resolve().name}"
    studies.compare_studies(one, other, folder, plain_console())


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _seconds(time: str | None) -> int | None:
    from shoal.launcher.submit.times import parse_time

    return None if time is None else parse_time(time)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise LaunchError(
            given=f"{option} {text}",
            found="not numbers above 0 with commas between them",
            fix=f"{option} 1,2,4",
        )
    return tuple(sorted(int(word) for word in words))


def _directory(given: Path | None, options: StudyOptions) -> Path:
    """Return the directory of a study, by default studies/MODEL.

    There `gpt:layers=8` becomes `gpt-layers=8`, and `a/train.py` becomes `train`.
    """
    if given is not None:
        return given
    name = Path(options.model).stem if options.model.endswith(".py") else options.model
    name = "".join(sign if sign.isalnum() or sign in "=-_." else "-" for sign in name)
    return Path("studies", name)


for command in (bench_machine.comm, bench_machine.data, bench_machine.modes):
    benches.command()(command)
