"""The commands `shoal bench comm`, `data` and `modes`: options in, results out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    from . import comm as measuring

    asked = measuring.request(
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
    raise typer.Exit(measuring.comm(asked, processes))
