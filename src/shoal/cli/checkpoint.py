"""The commands `shoal checkpoint …`: options in, results out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import examples, show_document
from shoal.util.arguments import check_choice
from shoal.util.errors import CheckpointError, raised_as

if TYPE_CHECKING:
    from shoal.checkpoint import AnyPath
    from shoal.checkpoint.inspect.dcp_export import DCPExport
    from shoal.checkpoint.inspect.diff import Comparison
    from shoal.checkpoint.inspect.extract import ExtractedModel
    from shoal.checkpoint.inspect.manifest import CheckpointManifest

checkpoints = typer.Typer(
    name="checkpoint",
    help="List, verify, compare, export, import checkpoints.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Directory = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A run directory, its checkpoints directory, one checkpoint, or a URL."
    ),
]


@checkpoints.command(
    "ls", epilog=examples("shoal checkpoint ls runs/a", "shoal checkpoint ls --verify runs/a")
)
def list_checkpoints(
    path: Directory,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the content of all files, not only sizes.")
    ] = False,
) -> None:
    """List checkpoints and incomplete saves of a run."""
    from shoal.checkpoint.inspect import documents, listing, locate

    with _readable(path):
        given = _place(path)
        if locate.is_checkpoint(given):
            one = [listing.entry(given, verify=verify)]
            show_document(documents.listing_document(given.parent, one, [], verified=verify))
            return
        for folder in locate.folders(given):
            found = list(listing.entries(folder, verify=verify))
            left = listing.leftovers(folder)
            show_document(documents.listing_document(folder, found, left, verified=verify))


@checkpoints.command(
    "show",
    epilog=examples(
        "shoal checkpoint show runs/a", "shoal checkpoint show runs/a/checkpoints/step-100"
    ),
)
def show_checkpoint(path: Directory) -> None:
    """Show metadata, tensors and state of a checkpoint.

    For a run directory, it shows the latest complete checkpoint.
    """
    from shoal.checkpoint.inspect import documents, locate

    with _readable(path):
        found = locate.read_newest([_place(path)], lambda found: found[0])
        show_document(documents.contents_document(found))


@checkpoints.command(
    "verify", epilog=examples("shoal checkpoint verify runs/a", "shoal checkpoint verify runs/*")
)
def verify_checkpoints(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Run directories or checkpoints.")
    ],
) -> None:
    """Verify every byte; exit with 1 if any is damaged."""
    from shoal.checkpoint.inspect import documents, locate

    damaged = False
    for path in paths:
        with _readable(path):
            for found in locate.examine_all(_place(path), locate.checkpoints, read=True):
                show_document(documents.verdict_document(found))
                damaged = damaged or bool(found.problems)
    raise typer.Exit(int(damaged))


@checkpoints.command(
    "diff",
    epilog=examples("shoal checkpoint diff runs/a runs/b", "shoal checkpoint diff A B && echo same"),
)
def compare_checkpoints(
    first: Annotated[str, typer.Argument(metavar="A", help="A run directory or a checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="B", help="A second run directory or checkpoint.")],
) -> None:
    """Compare two checkpoints.

    It exits with 1 if they differ. For run directories, it compares the latest complete checkpoints.
    Metadata such as the time may differ.
    """
    from shoal.checkpoint.inspect import diff, documents, locate

    def compare(both: list[CheckpointManifest]) -> tuple[AnyPath, AnyPath, Comparison]:
        one, other = both
        return one.path, other.path, diff.compare(one, other)

    with _readable(f"{first} {second}"):
        one, other, found = locate.read_newest([_place(first), _place(second)], compare)
    show_document(documents.difference_document(one, other, found))
    raise typer.Exit(int(not found.same))


@checkpoints.command(
    "export",
    epilog=examples(
        "shoal checkpoint export runs/a model.safetensors",
        "shoal checkpoint export --ema ema runs/a model.pt",
        "shoal checkpoint export --format dcp runs/a exported",
    ),
)
def export_checkpoint(
    path: Directory,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="OUT.safetensors, OUT.pt, OUT.pth, or a directory for DCP."),
    ],
    step: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Export the model of this Step (default: the first)."),
    ] = None,
    ema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Export the averaged parameters of this EMA.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="dcp writes a directory, with the optimizer state."
        ),
    ] = None,
) -> None:
    """Export the model of a checkpoint to one file.

    It needs neither the code of the model nor the processes that saved the checkpoint. With --format
    dcp, it writes model and optimizer state for torch.distributed.checkpoint.
    """
    from shoal.checkpoint.inspect import documents, locate
    from shoal.checkpoint.inspect import extract as extraction

    check_choice(CheckpointError, "shoal checkpoint export", "--format", form, (None, "dcp"))
    if form is not None:
        _export_dcp(path, out, step, ema)
        return

    def extract(newest: list[CheckpointManifest]) -> tuple[AnyPath, ExtractedModel]:
        return newest[0].path, extraction.extract(newest[0], Path(out), step=step, ema=ema)

    with _readable(f"{path} {out}"):
        found, done = locate.read_newest([_place(path)], extract)
    show_document(documents.extracted_document(found, done))


def _export_dcp(path: str, out: str, step: str | None, ema: str | None) -> None:
    from shoal.checkpoint.inspect import dcp_export, documents, locate

    if ema is not None:
        raise CheckpointError(
            given="shoal checkpoint export --format dcp --ema",
            found="optimizer states belong to the parameters, not to their averages",
            fix=f"shoal checkpoint export --ema {ema} {path} OUT.safetensors",
        )

    def write(newest: list[CheckpointManifest]) -> tuple[AnyPath, DCPExport]:
        return newest[0].path, dcp_export.export_dcp(newest[0], Path(out), step=step)

    with _readable(f"{path} {out}"):
        found, done = locate.read_newest([_place(path)], write)
    show_document(documents.dcp_document(found, done))


@checkpoints.command(
    "import",
    epilog=examples(
        "shoal checkpoint import out/checkpoint-500 runs/a",
        "shoal checkpoint import --step 1000 epoch-3 runs/a",
    ),
)
def import_foreign(
    other: Annotated[str, typer.Argument(metavar="OTHER", help="A checkpoint of another tool.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="A new run directory.")],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Optimizer steps taken (default: as recorded)."),
    ] = None,
) -> None:
    """Import a training state of another tool.

    It reads checkpoints of Accelerate, Lightning, the Trainer of transformers, DeepSpeed and
    torch.distributed.checkpoint, and writes the first checkpoint of a run directory. No code of the
    source is executed. It prints what is not carried over.
    """
    from shoal.checkpoint.importing.first_checkpoint import import_checkpoint
    from shoal.checkpoint.inspect import documents

    with _readable(f"{other} {run}"):
        done = import_checkpoint(Path(other), Path(run), step=step)
    show_document(documents.imported_document(other, done))


def _place(text: str) -> AnyPath:
    from shoal.checkpoint import path_from

    return path_from(text)


def _readable(path: str) -> AbstractContextManager[None]:
    """Convert errors of the file system to CheckpointErrors."""
    from shoal.checkpoint import is_url, masked_url

    fix = "check that you may read and write there (ls -ld), and that there is room (df -h)"
    if is_url(path):
        fix = "check that fsspec can access it with your credentials"
    return raised_as(CheckpointError, given=masked_url(path), fix=fix)
