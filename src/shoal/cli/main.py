"""The command line: reads options, calls the library and prints its result."""

from __future__ import annotations

import shlex
import signal
import sys
from typing import Annotated

import typer

from shoal.cli import bench as measuring
from shoal.cli import submit as jobs
from shoal.cli.checkpoint import checkpoints
from shoal.cli.checks import chaos, doctor, verify
from shoal.cli.options import SCRIPT_LAST, ScriptArgs, examples
from shoal.cli.plan import plan
from shoal.cli.report import last_exit, report
from shoal.cli.usage import report_all_problems
from shoal.util.errors import LaunchError, ShoalError

app = typer.Typer(
    name="shoal",
    help="Distributed PyTorch training with the same result on any number of processes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 a rank or a check failed, 2 wrong usage, 75 preempted after a "
    "checkpoint, 124 a rank hung, 130 Ctrl-C.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

TRAIN, OBSERVE, CLUSTERS = "Train", "Observe", "Clusters"
PLAN, MEASURE, VERIFY = "Plan", "Measure", "Verify"
"""The panels of `shoal --help`."""


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
    """Distributed PyTorch training with the same result on any number of processes."""


def _check_script(ctx: typer.Context, script: str) -> str:
    """Raise LaunchError if the script or module does not exist."""
    from shoal.launcher.entry_point import find_module, find_script

    if ctx.params.get("module"):
        find_module(script, safe_path=sys.flags.safe_path)
    else:
        find_script(script)
    return script


def _check_processes(ctx: typer.Context, processes: int | None) -> int:
    """Return the number of processes; raise LaunchError if it is missing."""
    from shoal.distributed.env_vars import nodes_of_job
    from shoal.launcher.nodes import choose_processes

    if processes is not None:
        return processes
    there = nodes_of_job()
    if there is None:
        option = "-m " if ctx.params.get("module") else ""
        script = ctx.params.get("script")
        raise LaunchError(
            given=f"shoal run {option}{shlex.quote(script)}" if script else "shoal run",
            found="the number of processes is missing; use one per GPU, or one per few CPU cores",
            fix=f"shoal run -n 2 {option}{shlex.quote(script or 'train.py')}",
        )
    return choose_processes(there)


def _check_numbers(nodes: str | None) -> str | None:
    """Raise LaunchError if the value of --nodes is not a number or MIN:MAX."""
    from shoal.launcher.nodes import parse_numbers

    if nodes is not None:
        parse_numbers(nodes)
    return nodes


def _check_address(rendezvous: str | None) -> str | None:
    """Raise LaunchError if the value of --rendezvous is not HOST:PORT."""
    from shoal.launcher.nodes import parse_address

    if rendezvous is not None:
        parse_address(rendezvous)
    return rendezvous


_Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="A Python file, or a module with -m.", callback=_check_script
    ),
]
_Module = Annotated[
    bool,
    typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m package.module`."),
]
_Processes = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--processes",
        "--nproc-per-node",
        min=1,
        metavar="N",
        help="Number of processes on this node; required unless the environment names the job's nodes.",
        callback=_check_processes,
    ),
]
_Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        "--max-restarts",
        min=0,
        metavar="N",
        help="Restart all processes up to N times after a failure.",
    ),
]
_Preemptions = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Restart up to N times after a preemption (exit code 75)."),
]
_Port = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, metavar="PORT", help="Port of the rendezvous (default: a free port)."
    ),
]
_Grace = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Time between SIGTERM and SIGKILL (default: 600 with an open Run, else 3).",
    ),
]
_Logs = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Append the output of each rank R to DIR/rank-R.log; print only rank 0's.",
    ),
]
_Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "--nnodes",
        metavar="N or MIN:MAX",
        help="Number of nodes (default: from the job's environment); MIN:MAX for elastic training.",
        callback=_check_numbers,
    ),
]
_Rendezvous = Annotated[
    str | None,
    typer.Option(
        "--rendezvous",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Address of the rendezvous (default: from the scheduler or the job's environment).",
        callback=_check_address,
    ),
]
_Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="Time to wait for the minimum number of nodes.")
]
_Silence = Annotated[
    float, typer.Option(metavar="SECONDS", help="Time without a heartbeat after which a node is lost.")
]


_HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@app.command(
    rich_help_panel=TRAIN,
    context_settings=SCRIPT_LAST,
    epilog=examples(
        "shoal run -n 4 train.py --lr 0.1",
        "shoal run -n 4 -m package.train --lr 0.1",
        "shoal run -n 4 --restarts 3 --logs logs train.py",
    ),
)
def run(
    *,
    script: _Script,
    args: ScriptArgs = None,
    processes: _Processes = None,
    module: _Module = False,
    restarts: _Restarts = 0,
    preemptions: _Preemptions = 0,
    port: _Port = None,
    grace: _Grace = None,
    logs: _Logs = None,
    nodes: _Nodes = None,
    rendezvous: _Rendezvous = None,
    wait: _Wait = 600.0,
    silence: _Silence = 5.0,
) -> None:
    """Launch a script on N processes.

    The script gets the environment variables of torchrun, and need not use Shoal. It exits with
    the exit code of the process that failed first.
    """
    from shoal.launcher import local

    # Heard while ranks run; after them the exit code stands, and schedulers repeat themselves.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    raise typer.Exit(
        local.run(
            script,
            jobs.script_arguments(args),
            processes=processes or 1,
            module=module,
            restarts=restarts,
            preemptions=preemptions,
            port=port,
            grace=grace,
            logs=logs,
            nodes=nodes,
            rendezvous=rendezvous,
            wait=wait,
            silence=silence,
        )
    )


@app.command(rich_help_panel=TRAIN, epilog=examples("shoal info", "srun shoal info"))
def info() -> None:
    """Print the environment and the resolved settings.

    Under srun, mpirun or torchrun, it joins the ranks of the job and reports all of them.
    """
    from shoal.tools.doctor.info import print_info
    from shoal.util.tables import plain_console

    print_info(plain_console())


app.command(
    rich_help_panel=TRAIN,
    epilog=examples("shoal doctor -n 2", "srun shoal doctor --strict --data /data/set"),
)(doctor)


@app.command(
    rich_help_panel=OBSERVE, epilog=examples("shoal watch runs/a", "shoal watch runs/a --every 60")
)
def watch(
    directory: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, which may not exist yet.")
    ],
    every: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Print a plain page at this interval."),
    ] = None,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Draw with ASCII characters only.")
    ] = False,
) -> None:
    """Show a run live: progress, curves, time per rank.

    On a terminal, the page updates until you press q. Elsewhere, it prints one plain page.
    It does not change the run.
    """
    from shoal.tools.report.dashboard import watch as watch_run

    raise typer.Exit(watch_run(directory, out=sys.stdout, every=every, ascii_only=ascii_only))


app.command(
    rich_help_panel=OBSERVE, epilog=examples("shoal report runs/a", "shoal report runs/a --text")
)(report)
app.command(
    rich_help_panel=OBSERVE,
    epilog=examples("shoal last-exit runs/a", "shoal last-exit runs/a --newer started"),
)(last_exit)
app.add_typer(checkpoints, rich_help_panel=OBSERVE)
app.command(
    rich_help_panel=CLUSTERS,
    context_settings=SCRIPT_LAST,
    epilog=examples(
        "shoal submit --nodes 4 --gpus-per-node 8 --time 20:00:00 train.py",
        "shoal submit --dry-run --time 1:00:00 train.py",
    ),
)(jobs.submit)
app.command(rich_help_panel=CLUSTERS, epilog=examples("shoal status", "shoal status runs/a"))(
    jobs.status
)
app.command(rich_help_panel=CLUSTERS, epilog=examples("shoal logs runs/a", "shoal logs -f runs/a"))(
    jobs.logs
)
app.command(
    rich_help_panel=CLUSTERS, epilog=examples("shoal cancel runs/a", "shoal cancel --now runs/a")
)(jobs.cancel)
app.add_typer(jobs.sites, rich_help_panel=CLUSTERS)
app.command(
    rich_help_panel=PLAN,
    epilog=examples(
        "shoal plan --model llama-70b --machine h100-sxm -n 64",
        "shoal plan --model llama-7b,seq=8192 --machine a100-80 -n 8 --json",
        "shoal plan --model llama-7b -n 64 --training tokens=2e12,mtbf=50000,save=20,restart=300",
        "shoal plan --model train.py:build --layout shard=8 -n 8 --batch 64",
        "shoal plan --model llama-7b -n 8 --submit 1 -- --time 1:00:00 train.py --layout {layout}",
    ),
)(plan)
app.add_typer(measuring.benches, rich_help_panel=MEASURE)
app.command(
    rich_help_panel=VERIFY,
    context_settings=SCRIPT_LAST,
    epilog=examples(
        "shoal verify train.py --epochs 3",
        "shoal verify --ranks 1,2,3 --kills 2 train.py",
        "shoal verify --against old.py train.py",
    ),
)(verify)
app.command(
    rich_help_panel=VERIFY,
    context_settings=SCRIPT_LAST,
    epilog=examples(
        "shoal chaos -n 4 train.py --epochs 3", "shoal chaos --faults all --count 20 --seed 7 train.py"
    ),
)(chaos)


report_all_problems(app)


def main() -> None:
    """Run the command; print a ShoalError and exit with 2."""
    try:
        app(prog_name="shoal")
    except ShoalError as error:
        print(str(error).strip(), file=sys.stderr)
        raise SystemExit(2) from None
