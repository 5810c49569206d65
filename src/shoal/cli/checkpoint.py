"""The commands `shoal checkpoint …`: options in, results out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import examples, show_document
from shoal.util.errors import CheckpointError, raised_as

if TYPE_CHECKING:
    from shoal.checkpoint import AnyPath
    from shoal.checkpoint.inspect.diff import Comparison
    from shoal.checkpoint.inspect.extract import ExtractedModel
    from shoal.checkpoint.inspect.manifest import CheckpointManifest

checkpoints = typer.Typer(
    name="checkpoint",
    help="List, verify, compare and export checkpoints.",
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
    ),
)
def export_checkpoint(
    path: Directory,
    out: Annotated[str, typer.Argument(metavar="OUT", help="OUT.safetensors, OUT.pt or OUT.pth.")],
    step: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Export the model of this Step (default: the first)."),
    ] = None,
    ema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Export the averaged parameters of this EMA.")
    ] = None,
) -> None:
    """Export the model of a checkpoint to one file.

    It needs neither the code of the model nor the processes that saved the checkpoint.
    """
    from shoal.checkpoint.inspect import documents, locate
    from shoal.checkpoint.inspect import extract as extraction

    def extract(newest: list[CheckpointManifest]) -> tuple[AnyPath, ExtractedModel]:
        return newest[0].path, extraction.extract(newest[0], Path(out), step=step, ema=ema)

    with _readable(f"{path} {out}"):
        found, done = locate.read_newest([_place(path)], extract)
    show_document(documents.extracted_document(found, done))


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
