"""The commands `shoal bench comm`, `data` and `modes`: options in, results out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.util.errors import LaunchError

_Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
_Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures there.")]


def comm(
    *,
    processes: Annotated[
        int | None,
        typer.Option("-n", "--processes", metavar="N", help="Start N here; not inside a job."),
    ] = None,
    backend: Annotated[
        str, typer.Option(metavar="LIST", help="gloo, nccl, mpi; else what a script would get.")
    ] = "",
    operations: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv, barrier; "
            "else all.",
        ),
    ] = "",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="As in 1KiB,1MiB; 1KiB:1MiB goes by fours.")
    ] = "1KiB:64MiB",
    repeats: Annotated[int, typer.Option(metavar="N", help="Samples of each point.")] = 20,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="For all of it.")] = 30.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also each pair of ranks.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The machine file.")
    ] = None,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Measure collectives over sizes, and write a machine file.

    With -n on processes of this machine; under srun, mpirun or torchrun on the ranks of the job.
    """
    from shoal.bench.collectives import command as measuring

    asked = measuring.parse_options(
        backends=backend,
        operations=operations,
        sizes=sizes,
        repeats=repeats,
        seconds=seconds,
        pairs=pairs,
        out=out,
        csv=csv,
        json=json,
    )
    raise typer.Exit(measuring.benchmark_collectives(asked, processes))


def data(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FACTORY",
            help="package.module:name or train.py:name; a dataset, or a function that returns one or a "
            "Loader and may take the World.",
        ),
    ],
    workers: Annotated[
        str, typer.Option(metavar="LIST", help="Else 0, 1, 2, 4 … up to twice the cores.")
    ] = "",
    batch_size: Annotated[str, typer.Option(metavar="LIST", help="Else 32, or the Loader's.")] = "",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="For all of it.")] = 30.0,
    step_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Of a training step, without waiting for data."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Or as this run recorded its steps.")
    ] = None,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Measure the input pipeline alone, and say how many workers are worth having."""
    from shoal.bench.data_loading import command as measuring

    asked = measuring.DataLoadingOptions(
        target=target,
        workers=_whole_numbers(workers, "--workers"),
        batch_sizes=_whole_numbers(batch_size, "--batch-size"),
        seconds=seconds,
        step_time=step_time,
        run=run,
        csv=csv,
        json=json,
    )
    raise typer.Exit(measuring.benchmark_data_loading(asked))


def _whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Different whole numbers, ascending."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise LaunchError(
            given=f"{option} {text}",
            found="not whole numbers with commas between them",
            fix=f"{option} 1,2,4",
        ) from None


def modes(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="dense, resnet-small, gpt …, with sizes as for `shoal bench scaling`; or "
            "package.module:name, a function that returns (model, task, dataset); or none.",
        ),
    ] = "dense",
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a batch of the model.")] = 32,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="For the measuring; compiling comes on top.")
    ] = 10.0,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Measure a Python loop, torch's operations, TorchScript and torch.compile.

    On a toy function, and on a model forward and backward.
    """
    from shoal.bench.compile import measure as measuring

    chosen = None if model == "none" else model
    asked = measuring.CompileOptions(model=chosen, batch=batch, seconds=seconds, csv=csv, json=json)
    raise typer.Exit(measuring.benchmark_modes(asked))
