"""The command line: reads options, calls the library, prints what it says."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import bench as measuring
from shoal.cli import submit as jobs
from shoal.cli.report import report
from shoal.util.errors import CheckpointError, LaunchError, ShoalError

if TYPE_CHECKING:
    from shoal.checkpoint import AnyPath
    from shoal.checkpoint.inspect.diff import Comparison
    from shoal.checkpoint.inspect.extract import Extracted
    from shoal.checkpoint.inspect.manifest import CheckpointManifest

app = typer.Typer(
    name="shoal",
    help="A PyTorch script from one process to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

checkpoints = typer.Typer(
    name="checkpoint",
    help="Look at checkpoints: list, show, verify, compare, export.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(checkpoints)


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


_HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
    from shoal.launcher import local

    if processes is None:
        raise LaunchError(
            given=f"shoal run {script}",
            found="not how many processes; one per GPU is usual, or one per few cores",
            fix=f"shoal run -n 2 {script}",
        )
    # Heard while ranks run; after them the exit code stands, and schedulers repeat themselves.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    raise typer.Exit(
        local.run(
            script,
            jobs.script_arguments(args),
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
    from shoal.doctor.info import print_info
    from shoal.util.tables import plain_console

    print_info(plain_console())


@app.command()
def doctor(
    *,
    processes: Annotated[
        int | None, typer.Option("-n", "--processes", metavar="N", help="Start so many ranks here.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="A run directory: try its file system.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A dataset: the same on all ranks?")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Your source: the same on all ranks?"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a check fails.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure neither compute nor links.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE.zip", help="Write an archive for support."),
    ] = None,
    redact_hosts: Annotated[
        bool, typer.Option("--redact-hosts", help="In the archive, replace hosts, user and home.")
    ] = False,
    limit: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long a check may take.")
    ] = 10.0,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long ranks wait for each other.")
    ] = 60.0,
) -> None:
    """Check this machine, or all ranks of a job, before training.

    Started by srun, mpirun or torchrun it joins their world and compares the ranks.
    """
    from shoal.cli import doctor as commands
    from shoal.doctor import runner

    order = commands.DoctorOptions(
        request=runner.DoctorRequest(
            run=run, data=data, source=source, limit=limit, wait=wait, quick=quick
        ),
        strict=strict,
        as_json=as_json,
        bundle=bundle,
        anonymous=redact_hosts,
    )
    if processes is None:
        raise typer.Exit(commands.diagnose(order, _describe))
    raise typer.Exit(commands.diagnose_here(order, processes, _describe))


def _describe() -> str:
    """Return what `shoal info` prints about this machine, in lines as long as they are."""
    from shoal.doctor.info import display, machine
    from shoal.util.tables import rendered

    return rendered(lambda console: display.print_machine(console, machine.describe()), 1000)


@app.command()
def watch(
    directory: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or one to come.")],
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Plain pages below each other, so often."),
    ] = None,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Without blocks and braille, which some fonts lack.")
    ] = False,
) -> None:
    """Show a run while it goes on: progress, curves, where each rank's time goes.

    A live page on a terminal, which q leaves; one plain page elsewhere. Reads only.
    """
    from shoal.report.dashboard import watch as watch_run

    raise typer.Exit(watch_run(directory, out=sys.stdout, every=every, ascii_only=ascii_only))


app.command(context_settings={"allow_interspersed_args": False})(jobs.submit)
for command in (jobs.status, jobs.logs, jobs.cancel):
    app.command()(command)
app.add_typer(jobs.sites)
app.add_typer(measuring.benches)
app.command()(report)


Directory = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A run directory, its checkpoints, or one of them; or a URL."),
]


@checkpoints.command("ls")
def list_checkpoints(
    path: Directory,
    verify: Annotated[bool, typer.Option("--verify", help="Read all files, not only sizes.")] = False,
) -> None:
    """List the checkpoints of a run, and what it left behind."""
    from shoal.checkpoint.inspect import display, listing, locate
    from shoal.util.tables import plain_console

    with _readable(path):
        given = _place(path)
        if locate.is_checkpoint(given):
            one = [listing.entry(given, verify=verify)]
            display.listing(plain_console(), given.parent, one, [], verified=verify)
            return
        for folder in locate.folders(given):
            found = list(listing.entries(folder, verify=verify))
            left = listing.leftovers(folder)
            display.listing(plain_console(), folder, found, left, verified=verify)


@checkpoints.command("show")
def show_checkpoint(path: Directory) -> None:
    """Show what a checkpoint holds: its origin, tensors and state.

    Of a run it is the newest that has all its files.
    """
    from shoal.checkpoint.inspect import display, locate
    from shoal.util.tables import plain_console

    with _readable(path):
        display.contents(plain_console(), locate.read_newest([_place(path)], lambda found: found[0]))


@checkpoints.command("verify")
def verify_checkpoints(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Runs or checkpoints.")],
) -> None:
    """Read every byte; exit with 1 if one is damaged."""
    from shoal.checkpoint.inspect import display, locate
    from shoal.checkpoint.inspect import verify as soundness
    from shoal.util.tables import plain_console

    damaged = False
    for path in paths:
        with _readable(path):
            for listed in locate.checkpoints(_place(path)):
                found, problems = locate.examined(listed, read=True)
                if found is None:  # a live run has removed it since
                    continue
                step = None if problems else soundness.manifest(found).step
                display.verdict(plain_console(), found, problems, step=step)
                damaged = damaged or bool(problems)
    raise typer.Exit(int(damaged))


@checkpoints.command("diff")
def compare_checkpoints(
    first: Annotated[str, typer.Argument(metavar="A", help="A run directory or a checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Compare two; exit with 0 if they are the same, else 1.

    Of runs the newest are compared. Circumstances, such as the time, may differ.
    """
    from shoal.checkpoint.inspect import diff, display, locate
    from shoal.util.tables import plain_console

    def compare(both: list[CheckpointManifest]) -> tuple[AnyPath, AnyPath, Comparison]:
        one, other = both
        return one.path, other.path, diff.compare(one, other)

    with _readable(f"{first} {second}"):
        one, other, found = locate.read_newest([_place(first), _place(second)], compare)
    display.differences(plain_console(), one, other, found)
    raise typer.Exit(int(not found.same))


@checkpoints.command("export")
def export_checkpoint(
    path: Directory,
    out: Annotated[str, typer.Argument(metavar="OUT", help="OUT.safetensors or OUT.pt.")],
    step: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model of this Step; else of the first.")
    ] = None,
    ema: Annotated[
        str | None, typer.Option(metavar="NAME", help="With the averages of this EMA.")
    ] = None,
) -> None:
    """Write the model of a checkpoint for use without Shoal.

    Neither the model's code nor the processes that saved it are needed.
    """
    from shoal.checkpoint.inspect import display, locate
    from shoal.checkpoint.inspect import extract as extraction
    from shoal.util.tables import plain_console

    def extract(newest: list[CheckpointManifest]) -> tuple[AnyPath, Extracted]:
        return newest[0].path, extraction.extract(newest[0], Path(out), step=step, ema=ema)

    with _readable(f"{path} {out}"):
        found, done = locate.read_newest([_place(path)], extract)
    display.extracted(plain_console(), found, done)


def _place(text: str) -> AnyPath:
    from shoal.checkpoint import path_from

    return path_from(text)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """What the file system refuses, told like any other error."""
    from shoal.checkpoint import is_url, masked_url

    try:
        yield
    except OSError as error:
        here = "see whether you may read and write there (ls -ld), and whether there is room (df -h)"
        raise CheckpointError(
            given=masked_url(path),
            found=str(error),
            fix="see whether fsspec reaches it with your login" if is_url(path) else here,
        ) from None


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
