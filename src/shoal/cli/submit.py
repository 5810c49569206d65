"""The commands `shoal submit`, `status`, `logs`, `cancel` and `sites`: options in, results out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.submit_options import Account, Cpus, Directive, Force, Partition, Qos, Site
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.launcher.submit.job import JobRequest
    from shoal.launcher.submit.submit import SubmitOptions

sites = typer.Typer(
    name="sites",
    help="What clusters want and allow: list, show, draft.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory that `shoal submit` was given.")
]
_Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file.")]
_Args = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Arguments of the script.")
]
_Time = Annotated[str, typer.Option(metavar="HH:MM:SS", help="How long it may run; required.")]
_Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="How many nodes.")]
_Gpus = Annotated[
    int, typer.Option(min=0, metavar="N", help="GPUs of each node, with a process for each.")
]
_Processes = Annotated[
    int | None,
    typer.Option("-n", "--processes", min=1, metavar="N", help="Processes of all nodes together."),
]
_Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each node.")]
_Constraint = Annotated[
    str | None, typer.Option("-C", "--constraint", metavar="LIST", help="Features that nodes have.")
]
_Name = Annotated[str | None, typer.Option(metavar="NAME", help="Of the job; else the script's.")]
_RunOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run directory; else runs/NAME for NAME.py.")
]
_Sweep = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="An array: a job for each line, whose words come after ARGS."),
]
_AtOnce = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="How many of an array may run at once.")
]
_Chain = Annotated[
    int, typer.Option(min=1, metavar="N", help="N jobs after each other, where none may requeue.")
]
_Restarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="Requeue the job after up to N failures.")
]
_Launcher = Annotated[
    str | None, typer.Option(metavar="NAME", help="torchrun, mpirun or the scheduler's.")
]
_Container = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="Run inside of this image, by Apptainer.")
]
_Python = Annotated[str | None, typer.Option(metavar="PATH", help="The interpreter; else this one.")]
_Stage = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Copy it to each node's own disk, and let ARGS mean the copy."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the batch script, no more.")]
_Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it there; don't submit.")
]
_Copy = Annotated[bool, typer.Option(help="Run a copy of the source as it is now.")]


def script_arguments(words: list[str] | None) -> list[str]:
    """The script's arguments among the words after its name: all but the first `--`.

    That one ends the options of Shoal; every later `--` is the script's own.
    """
    found = list(words or ())
    if "--" in found:
        found.remove("--")
    return found


def submit(
    *,
    script: _Script,
    args: _Args = None,
    time: _Time = "",
    nodes: _Nodes = 1,
    gpus_per_node: _Gpus = 0,
    processes: _Processes = None,
    cpus_per_task: Cpus = None,
    mem: _Memory = None,
    site: Site = None,
    partition: Partition = None,
    constraint: _Constraint = None,
    qos: Qos = None,
    account: Account = None,
    name: _Name = None,
    run: _RunOption = None,
    sweep: _Sweep = None,
    at_once: _AtOnce = None,
    chain: _Chain = 1,
    restarts: _Restarts = 0,
    launcher: _Launcher = None,
    container: _Container = None,
    python: _Python = None,
    stage: _Stage = None,
    directive: Directive = None,
    dry_run: _DryRun = False,
    out: _Out = None,
    copy: _Copy = True,
    force: Force = False,
) -> None:
    """Submit a script to the cluster's scheduler; it survives preemption and its time limit.

    It is checked against the site first, runs a copy of the source, and goes back into the queue
    after it has saved.
    """
    from shoal.launcher.submit.job import JobRequest
    from shoal.launcher.submit.submit import SubmitOptions

    request = JobRequest(
        script=str(script),
        args=tuple(script_arguments(args)),
        time=_time(time, script),
        nodes=nodes,
        gpus=gpus_per_node,
        processes=processes,
        cpus=cpus_per_task,
        memory=mem,
        partition=partition,
        constraint=constraint,
        qos=qos,
        account=account,
        name=name,
        launcher=launcher,
        container=container,
        python=python,
        sweep=_sweep(sweep),
        at_once=at_once,
        chain=chain,
        restarts=restarts,
        options=tuple(directive or ()),
        stage=tuple(stage or ()),
    )
    _submit(request, site, SubmitOptions(run=run, dry=dry_run, out=out, copy=copy, force=force))


def _submit(request: JobRequest, site: str | None, options: SubmitOptions) -> None:
    from shoal.launcher.submit import display
    from shoal.launcher.submit.site_catalog import choose
    from shoal.launcher.submit.submit import submit as hand_in
    from shoal.util.tables import plain_console

    done = hand_in(request, choose(site).value, options)
    if options.dry:
        display.print_script(plain_console(), done)
        display.print_dry_run(plain_console(stderr=True), done)
    else:
        display.print_submission(plain_console(), done, out=options.out)


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory; else all.")
    ] = None,
) -> None:
    """Show how the newest submission of a run is, and how far its training is.

    Without RUN, one line for each run that you have submitted, and for those in runs/ here.
    """
    from shoal.launcher.submit import display
    from shoal.launcher.submit import status as following
    from shoal.util.tables import plain_console

    if run is None:
        found = following.runs(Path("runs"))
        display.print_overview(plain_console(), [following.status(each) for each in found])
    else:
        display.print_status(plain_console(), following.status(run))


def logs(
    run: _Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    element: Annotated[int | None, typer.Option(metavar="N", help="Of an array; else all.")] = None,
) -> None:
    """Print the log of the newest submission of a run."""
    import shlex
    import subprocess

    from shoal.launcher.submit.status import log_files

    files = log_files(run, element)
    how = ["-F"] if follow else []
    there = [file for file in files if follow or file.exists()]
    if not there:
        quoted = shlex.quote(str(run))
        raise LaunchError(
            given=f"shoal logs {quoted}",
            found=f"no {files[0].name} yet: the job has not started",
            fix=f"shoal status {quoted}, or shoal logs -f {quoted} to wait for it",
        )
    try:
        done = subprocess.run(["tail", "-n", "+1", *how, "--", *map(str, there)], check=False)
    except KeyboardInterrupt:
        return
    raise typer.Exit(done.returncode)


def cancel(
    run: _Run,
    now: Annotated[bool, typer.Option("--now", help="At once, without a save.")] = False,
) -> None:
    """End the newest submission of a run: what runs saves first, and does not go on."""
    from shoal.launcher.submit import status as following
    from shoal.util.tables import plain_console, print_line

    record, active = following.cancel(run, now=now)
    how = "ended" if now else "told to save and to end"
    how = how if active else "had ended before"
    print_line(plain_console(), f"job {', '.join(record.jobs)}: {how}")


@sites.command("ls")
def list_sites() -> None:
    """List the sites that come with Shoal, and your own."""
    from shoal.launcher.submit import display
    from shoal.launcher.submit.site_catalog import entries
    from shoal.util.tables import plain_console

    display.print_sites(plain_console(), entries().values())


@sites.command("show")
def show_site(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Print the file of a site, to read or to copy."""
    from shoal.launcher.submit import display
    from shoal.launcher.submit.site_catalog import find_entry
    from shoal.util.tables import plain_console

    display.print_site_file(plain_console(), find_entry(name))


@sites.command("new")
def new_site(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Draft a site from what the scheduler says of this cluster."""
    from shoal.launcher.submit.schedulers import scheduler_here
    from shoal.launcher.submit.site_catalog import folder
    from shoal.util.tables import plain_console, print_path

    path = folder() / f"{name}.toml"
    if path.name != f"{name}.toml" or path.exists():
        raise LaunchError(
            given=f"shoal sites new {name}",
            found=f"{path} is there already" if path.exists() else "not the name of a file",
            fix="choose another name, or remove that file",
        )
    text = scheduler_here().draft_site(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise LaunchError(
            given=f"shoal sites new {name}",
            found=str(error),
            fix="export XDG_CONFIG_HOME=DIR with a directory that you may write to",
        ) from None
    print_path(plain_console(), f"{path}: look it over, then shoal submit --site {name} …")


def _time(text: str, script: Path) -> int:
    from shoal.launcher.submit.times import parse_time

    if not text:
        raise LaunchError(
            given=f"shoal submit {script}",
            found="not how long it may run; without it clusters differ, from minutes to days",
            fix=f"shoal submit --time 20:00:00 {script}",
        )
    return parse_time(text)


def _sweep(path: Path | None) -> tuple[tuple[str, ...], ...]:
    """The words of each line of a file; empty lines and those that begin with # are passed over."""
    import shlex

    if path is None:
        return ()
    try:
        lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise LaunchError(
            given=f"--sweep {path}",
            found=str(error),
            fix="a file with the arguments of one job in each line, as in `--lr 0.1 --run runs/a`",
        ) from None
    found = tuple(tuple(words) for words in lines if words)
    if not found:
        raise LaunchError(
            given=f"--sweep {path}",
            found="no line with arguments",
            fix="the arguments of one job in each line, as in `--lr 0.1 --run runs/a`",
        )
    return found
