"""The commands `shoal bench …`: options in, results out."""

from __future__ import annotations

import typer

benches = typer.Typer(
    name="bench",
    help="Measure: how a model scales, two such studies beside each other.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@benches.callback()
def bench() -> None:
    """Measure what this machine gives."""
