"""The commands `shoal bench comm`, `data`, `modes` and `machine`: options in, results out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.util.errors import LaunchError, raised_as

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.tools.plan.work.planned_step import Work

_MICRO_BATCH = 8
_CAUSES = "The model is too small, or other programs use the machine."
_Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON at the end.")]
_Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to FILE.")]


def comm(
    *,
    processes: Annotated[
        int | None,
        typer.Option(
            "-n", "--processes", metavar="N", help="Start N processes on this node, outside a job."
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Backends: gloo, nccl, mpi (default: the backend of training)."
        ),
    ] = "",
    operations: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv, barrier "
            "(default: all).",
        ),
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="SIZES", help="Message sizes: 1KiB,1MiB; or 1KiB:1MiB, each four times the last."
        ),
    ] = "1KiB:64MiB",
    repeats: Annotated[int, typer.Option(metavar="N", help="Samples per point.")] = 20,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Total time.")] = 30.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also measure each pair of ranks.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The machine file.")
    ] = None,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Measure the speed of collectives by message size.

    It writes the results to a machine file. With -n, it starts processes on this node. Under srun,
    mpirun or torchrun, it measures the ranks of the job.
    """
    from shoal.tools.bench.collectives import command as measuring
    from shoal.tools.bench.collectives.measure import OPERATIONS
    from shoal.tools.bench.measurement import Output
    from shoal.tools.bench.options import parse_choices, parse_sizes

    asked = measuring.CollectivesRequest(
        backends=parse_choices("shoal bench comm", "--backend", backend, measuring.BACKENDS),
        operations=parse_choices("shoal bench comm", "--operations", operations, OPERATIONS),
        sizes=parse_sizes(sizes),
        repeats=repeats,
        seconds=seconds,
        pairs=pairs,
        out=out,
        output=Output(csv=csv, json=json),
    )
    raise typer.Exit(measuring.benchmark_collectives(asked, processes))


def data(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FACTORY",
            help="package.module:name or train.py:name of a dataset, a Loader, or a function that "
            "returns one; the function may take the World.",
        ),
    ],
    workers: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Numbers of workers (default: 0, 1, 2, 4 … up to twice the cores)."
        ),
    ] = "",
    batch_size: Annotated[
        str, typer.Option(metavar="LIST", help="Batch sizes (default: 32, or the Loader's).")
    ] = "",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Total time.")] = 30.0,
    step_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time of a training step without data loading."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Take the step time from this run.")
    ] = None,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Measure data loading and suggest num_workers."""
    from shoal.tools.bench.data_loading.command import benchmark_data_loading
    from shoal.tools.bench.measurement import Output
    from shoal.tools.bench.options import parse_numbers

    code = benchmark_data_loading(
        target,
        workers=parse_numbers("--workers", workers, least=0),
        batch_sizes=parse_numbers("--batch-size", batch_size, least=1),
        seconds=seconds,
        step_time=step_time,
        run=run,
        output=Output(csv=csv, json=json),
    )
    raise typer.Exit(code)


def modes(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="A model: dense, resnet-small, gpt …, with sizes as for `shoal bench scaling`; or "
            "module:function, which returns (model, task, dataset); or none.",
        ),
    ] = "dense",
    batch: Annotated[int, typer.Option(metavar="N", help="Samples in a batch of the model.")] = 32,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for measurements, without compilation.")
    ] = 10.0,
    csv: _Csv = None,
    json: _Json = False,
) -> None:
    """Compare eager, TorchScript and torch.compile.

    It measures a toy function, and the forward and backward passes of a model.
    """
    from shoal.tools.bench.compile.measure import benchmark_modes
    from shoal.tools.bench.measurement import Output

    chosen, output = None if model == "none" else model, Output(csv=csv, json=json)
    raise typer.Exit(benchmark_modes(chosen, batch=batch, seconds=seconds, output=output))


def machine(
    *,
    comm: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file of `shoal bench comm`; several are possible."),
    ] = None,
    link: Annotated[
        float | None, typer.Option(min=1e-6, metavar="GB/S", help="Bandwidth within a node.")
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(min=1e-6, metavar="GB/S", help="Bandwidth between nodes, per device."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="N", help="Devices of a node (default: its ranks in --comm)."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="Measure the efficiencies with a model: train.py:name of a function that returns "
            "(model, task, dataset), or a built-in model of `shoal bench scaling`.",
        ),
    ] = "",
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=f"Samples in a micro-batch of --model (default: {_MICRO_BATCH})."
        ),
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the machine.")] = "measured",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write to FILE instead of the terminal."),
    ] = None,
) -> None:
    """Measure a device for `shoal plan --machine`.

    It measures matrix products, memory, attention, convolutions and the host, and takes the bandwidth
    between ranks from files of `shoal bench comm`. With --model, it also measures the operations of a
    model. The result has the form of the catalogue.
    """
    from shoal.tools.bench.measurement import require_alone
    from shoal.tools.plan.machine import operation_times
    from shoal.tools.plan.machine.measure import check_rates, machine_toml, measure_machine, read_rates
    from shoal.tools.plan.search.fit import named_workload

    _check_machine_options(name, model, micro_batch, out)
    rates = read_rates(comm or [], link, network)
    check_rates(rates)
    kinds: Mapping[str, tuple[Work, float]] = {}
    if model:
        require_alone("shoal bench machine --model")
        samples = micro_batch or _MICRO_BATCH
        kinds = operation_times.time_operations(model, named_workload(model, samples), samples).kinds()
    found = operation_times.fit_operations(
        measure_machine(name, rates, devices or rates.per_node), kinds
    )
    for kind in operation_times.unlikely_efficiencies(found, kinds):
        value = f"{getattr(found.efficiency, kind):g}"
        typer.echo(f"Warning: {kind} is at the limit of its range, {value}. {_CAUSES}", err=True)
    text = machine_toml(found)
    if out is None:
        typer.echo(text, nl=False)
        return
    with raised_as(LaunchError, given=f"-o {out}", fix="use a directory where you have permission"):
        out.write_text(text, encoding="utf-8")


def _check_machine_options(name: str, model: str, micro_batch: int | None, out: Path | None) -> None:
    """Raise LaunchError for options of `shoal bench machine` that are wrong before it measures."""
    from shoal.tools.bench.options import check_output

    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise LaunchError(
            given=f"--name {name}",
            found="a name has letters, digits, - and _",
            fix="--name my-cluster",
        )
    if micro_batch is not None and not model:
        raise LaunchError(
            given=f"--micro-batch {micro_batch}",
            found="no --model",
            fix="--model train.py:build, or leave out --micro-batch",
        )
    check_output("-o", out)
