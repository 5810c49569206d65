"""The command line: reads options, calls the library, prints what it says."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .errors import LaunchError, ShoalError

app = typer.Typer(
    name="shoal",
    help="A PyTorch script from one process to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def shoal(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A PyTorch script from one process to a cluster."""


_Nodes = Annotated[
    str | None, typer.Option(metavar="N[:M]", help="One of N machines, or of N to M that come and go.")
]
_Rendezvous = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where they meet; else as the scheduler says.")
]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for enough machines.")]
_Silence = Annotated[
    float, typer.Option(metavar="SECONDS", help="Without a sign of life so long, a machine has left.")
]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    processes: Annotated[
        str | None, typer.Option("-n", "--processes", metavar="N", help="How many processes to start.")
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the script.")
    ] = None,
    restarts: Annotated[
        str,
        typer.Option(metavar="N", help="How often to start all again after a failure."),
    ] = "0",
    preemptions: Annotated[
        str,
        typer.Option(metavar="N", help="How often to start all again when ranks left to save (75)."),
    ] = "0",
    port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Where the processes meet; else a free one.")
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="From asking processes to end to SIGKILL; else 600 where they save, 3 elsewhere.",
        ),
    ] = None,
    logs: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Append what rank R writes to DIR/rank-R.log; show rank 0's."),
    ] = None,
    nodes: _Nodes = None,
    rendezvous: _Rendezvous = None,
    wait: _Wait = 600.0,
    silence: _Silence = 5.0,
) -> None:
    """Run a script in N processes on this machine, or on this one of several.

    The script finds its place as under torchrun; it need not use Shoal. The exit code is that of
    the first process that fails.
    """
    from .launching import local

    if processes is None:
        raise LaunchError(
            given=f"shoal run {script}",
            found="not how many processes; one per GPU is usual, or one per few cores",
            fix=f"shoal run -n 2 {script}",
        )
    given = args or []
    raise typer.Exit(
        local.run(
            script,
            given[1:] if given[:1] == ["--"] else given,
            processes=_whole(processes, "-n"),
            restarts=_whole(restarts, "--restarts"),
            preemptions=_whole(preemptions, "--preemptions"),
            port=None if port is None else _whole(port, "--port"),
            grace=grace,
            logs=logs,
            nodes=nodes,
            rendezvous=rendezvous,
            wait=wait,
            silence=silence,
        )
    )


@app.command()
def info() -> None:
    """Print what is here, what shoal.init chooses and why.

    Started by srun, mpirun or torchrun it joins their world and tells of every rank.
    """
    from rich.console import Console

    from .info import show

    # Without styles: a launcher may give a rank a terminal of its own and write into a file.
    show(Console(color_system=None, highlight=False))


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            given=f"{option} {text}",
            found=f"{text!r} is not a whole number",
            fix=f"give a number, as in `{option} 2`",
        ) from None


def main() -> None:
    """Run the command; a ShoalError becomes its lines and exit code 2."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        print(str(error).strip(), file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
