"""The commands `shoal bench …`: options in, results out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import bench_machine
from shoal.cli.options import Account, Cpus, Directive, Force, Partition, Qos, Site, examples
from shoal.util.errors import LaunchError

benches = typer.Typer(
    name="bench",
    help="Benchmark scaling, network, data and compile.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@benches.callback()
def bench() -> None:
    """Benchmark scaling, network, data loading and compilation."""


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model: dense, resnet-small, resnet18, resnet50, resnet101 or gpt, with sizes as in "
        "gpt:layers=8,width=512; module:function; or SCRIPT.py.",
    ),
]
_Args = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS",
        help="Arguments of a script; each job replaces {run}, {batch}, {steps}, {backend} ….",
    ),
]
_Processes = Annotated[
    str,
    typer.Option("-n", "--processes", metavar="LIST", help="Numbers of processes, for example 1,2,4."),
]
_Scaling = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Strong scaling (processes split one batch) or weak (one batch each): strong,weak.",
    ),
]
_Backends = Annotated[str, typer.Option(metavar="LIST", help="Backends: auto, gloo, nccl, mpi.")]
_Strategies = Annotated[str, typer.Option(metavar="LIST", help="Strategies: ddp, fsdp.")]
_Precisions = Annotated[str, typer.Option(metavar="LIST", help="Precisions: fp32, bf16, fp16.")]
_Ways = Annotated[str, typer.Option(metavar="LIST", help="Execution modes: eager, script, inductor.")]
_Batch = Annotated[
    int,
    typer.Option(
        metavar="N", help="Samples per step: in total for strong scaling, per process for weak."
    ),
]
_Steps = Annotated[int, typer.Option(metavar="N", help="Measured steps per job.")]
_Warmup = Annotated[int, typer.Option(metavar="N", help="Warm-up steps per job.")]
_Rounds = Annotated[int, typer.Option(metavar="N", help="Jobs per configuration.")]
_Threads = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="Threads per process (default: cores / processes; 0: no limit)."
    ),
]
_Limit = Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Time limit of a job.")]
_Study = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the results (default: studies/MODEL).")
]
_Mpirun = Annotated[
    str | None, typer.Option(metavar="COMMAND", help="Command that starts MPI ranks, with its options.")
]
_Submit = Annotated[
    bool,
    typer.Option("--submit", help="Submit the study as cluster jobs; the options below need this."),
]
_Time = Annotated[
    str | None,
    typer.Option(metavar="HH:MM:SS", help="Time limit of each job (default: enough for all its runs)."),
]
_Gpus = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="GPUs per node (default: from the profile; 0: none)."),
]
_Tasks = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Processes per node (default: one per GPU or core)."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts and submit nothing.")]

_SCALING = examples("shoal bench scaling resnet50 -n 1,2,4", "shoal bench scaling train.py -n 1,2")


@benches.command(epilog=_SCALING)
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
    """Measure the speed-up on 1, 2, 4 … processes.

    Each configuration runs several times as a separate job, in an order that changes. Jobs that have
    a result do not run again. The report explains what limits the speed-up.
    """
    from shoal.tools.bench.options import parse_numbers, parse_words
    from shoal.tools.bench.scaling import configurations, submission
    from shoal.tools.bench.scaling import study as studies
    from shoal.tools.submit.times import parse_time

    options = configurations.StudyOptions(
        model=model,
        args=tuple(args or ()),
        processes=parse_numbers("-n", processes, least=1),
        scalings=parse_words(scaling),
        backends=parse_words(backends),
        strategies=parse_words(strategies),
        precisions=parse_words(precisions),
        ways=parse_words(ways),
        batch=batch,
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        limit=limit,
    )
    asked = submission.ClusterRequest(
        site=site,
        partition=partition,
        account=account,
        qos=qos,
        time=None if time is None else parse_time(time),
        gpus=gpus_per_node,
        tasks=tasks_per_node,
        cpus=cpus_per_task,
        options=tuple(directive or ()),
        force=force,
    )
    if submit:
        done = studies.submit_study(study, options, threads, asked, dry=dry_run)
    elif dry_run or asked != submission.ClusterRequest():
        raise _no_submit(model)
    else:
        done = studies.measure_study(study, options, threads, mpirun)
    raise typer.Exit(int(not done))


def _no_submit(model: str) -> LaunchError:
    return LaunchError(
        given=f"shoal bench scaling {model}, with options for a cluster",
        found="no --submit: the study would run on this machine",
        fix="add --submit, or leave out --site, --partition and the options after them in --help",
    )


@benches.command(epilog=examples("shoal bench collect studies/resnet50"))
def collect(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="A study's directory.")],
) -> None:
    """Show the results of a submitted study.

    It lists jobs that are waiting, running or ended without a result, and exits with 1 while
    results are missing.
    """
    from shoal.tools.bench.scaling import study as studies

    raise typer.Exit(int(not studies.collect_study(study)))


@benches.command(epilog=examples("shoal bench compare studies/a studies/b"))
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A study's directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The directory of another study.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Directory of the page (default: B/compared-with-A)."
        ),
    ] = None,
) -> None:
    """Compare two studies of one model."""
    from shoal.tools.bench.scaling import study as studies

    studies.compare_studies(first, second, out or second / f"compared-with-{first.resolve().name}")


benches.command(epilog=examples("shoal bench comm -n 2", "srun shoal bench comm --pairs"))(
    bench_machine.comm
)
benches.command(
    epilog=examples(
        "shoal bench data train.py:dataset", "shoal bench data train.py:dataset --run runs/a"
    )
)(bench_machine.data)
benches.command(epilog=examples("shoal bench modes", "shoal bench modes gpt:layers=2"))(
    bench_machine.modes
)
benches.command(
    epilog=examples(
        "shoal bench machine --comm comm.json --network 12.5 -o mine.toml",
        "shoal bench machine --link 300 --network 12.5 --model train.py:build --micro-batch 8",
        "shoal plan --model llama-7b --machine mine.toml",
    )
)(bench_machine.machine)
