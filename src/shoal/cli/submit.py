"""The commands `shoal submit`, `status`, `logs`, `cancel` and `sites`: options in, results out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import (
    Account,
    Cpus,
    Directive,
    Force,
    Partition,
    Qos,
    ScriptArgs,
    Site,
    examples,
    show_document,
)
from shoal.util.errors import LaunchError, raised_as

if TYPE_CHECKING:
    from shoal.tools.submit.scheduler import JobRequest
    from shoal.tools.submit.submit import SubmitOptions

sites = typer.Typer(
    name="sites",
    help="List, show and draft cluster profiles.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_SiteName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile.")]
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory of the job.")]


def _check_script(script: str) -> str:
    """Raise LaunchError if the script does not exist."""
    from shoal.launcher.entry_point import find_script

    return find_script(script, "shoal submit … train.py")


def _check_time(ctx: typer.Context, time: str) -> str:
    """Raise LaunchError if there is no time limit, or none that can be read."""
    from shoal.tools.submit.times import parse_time

    if not time:
        script = ctx.params.get("script")
        raise LaunchError(
            given=f"shoal submit {script}" if script else "shoal submit",
            found="no time limit; the default differs between clusters, from minutes to days",
            fix=f"shoal submit --time 20:00:00 {script or 'train.py'}",
        )
    parse_time(time)
    return time


_Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python file.", callback=_check_script)
]
_Time = Annotated[
    str,
    typer.Option(metavar="HH:MM:SS", help="Time limit of the job; required.", callback=_check_time),
]
_Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")]
_Gpus = Annotated[
    int, typer.Option(min=0, metavar="N", help="GPUs per node, with one process per GPU.")
]
_Processes = Annotated[
    int | None,
    typer.Option("-n", "--processes", min=1, metavar="N", help="Total number of processes."),
]
_Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory per node, for example 64G.")]
_Constraint = Annotated[
    str | None,
    typer.Option("-C", "--constraint", metavar="LIST", help="Required features of the nodes."),
]
_Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the job (default: the name of the script).")
]
_RunOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory (default: runs/NAME for NAME.py).")
]
_Sweep = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Submit an array: one job per line of FILE, which is added to ARGS."
    ),
]
_AtOnce = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Largest number of array jobs that run at the same time."),
]
_Chain = Annotated[
    int, typer.Option(min=1, metavar="N", help="Submit a chain of N jobs, on clusters without requeue.")
]
_Restarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="Requeue the job after up to N failures.")
]
_Launcher = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Launcher, such as torchrun or mpirun (default: the scheduler's)."
    ),
]
_Container = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="Run inside this image (default: the site's).")
]
_Python = Annotated[
    str | None, typer.Option(metavar="PATH", help="Python interpreter of the job (default: this one).")
]
_Stage = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="Copy PATH to the local disk of each node, and pass the copy to the script.",
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the batch script or manifest, and submit nothing.")
]
_Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="Write the batch script to FILE and submit nothing."
    ),
]
_Copy = Annotated[bool, typer.Option(help="Run a copy of the current source code.")]


def script_arguments(words: list[str] | None) -> list[str]:
    """Return the arguments of the script: the words after its name without the first `--`.

    The first `--` ends the options of Shoal; later ones belong to the script.
    """
    found = list(words or ())
    if "--" in found:
        found.remove("--")
    return found


def submit(
    *,
    script: _Script,
    args: ScriptArgs = None,
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
    """Submit to a batch system, Kubernetes or Ray.

    Shoal checks the job against the cluster profile and runs a copy of the source. Before the time
    limit or a preemption, the job saves a checkpoint and returns to the queue.
    """
    from shoal.tools.submit.scheduler import JobRequest
    from shoal.tools.submit.submit import SubmitOptions
    from shoal.tools.submit.times import parse_time

    if at_once is not None and sweep is None:
        raise LaunchError(
            given=f"--at-once {at_once}",
            found="no --sweep: one job, not an array",
            fix="add --sweep FILE, or leave --at-once out",
        )
    request = JobRequest(
        script=script,
        args=tuple(script_arguments(args)),
        time=parse_time(time),
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
    from shoal.tools.submit.documents import submission_document
    from shoal.tools.submit.site_catalog import choose
    from shoal.tools.submit.submit import submit as hand_in

    done = hand_in(request, choose(site).value, options)
    if options.dry:
        typer.echo(done.script, nl=False)  # alone, as the output may go into a file
    show_document(submission_document(done, options.out), stderr=options.dry)


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory (default: all).")
    ] = None,
) -> None:
    """Show the state and progress of submitted jobs.

    Without RUN, it prints one line for each run that you submitted and for each run in ./runs.
    """
    from shoal.tools.submit import status as following
    from shoal.tools.submit.documents import overview_document, status_document

    if run is None:
        found = following.runs(Path("runs"))
        show_document(overview_document([following.status(each) for each in found]))
    else:
        show_document(status_document(following.status(run)))


def logs(
    run: _Run,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until Ctrl-C.")
    ] = False,
    element: Annotated[
        int | None, typer.Option(metavar="N", help="Array element (default: all).")
    ] = None,
) -> None:
    """Print the log of the latest job of a run."""
    import subprocess

    from shoal.tools.submit.status import log_command

    command = log_command(run, element, follow=follow)
    try:
        done = subprocess.run(command, check=False)
    except KeyboardInterrupt:
        return
    raise typer.Exit(done.returncode)


def cancel(
    run: _Run,
    now: Annotated[
        bool, typer.Option("--now", help="Cancel immediately, without a checkpoint.")
    ] = False,
) -> None:
    """Cancel the latest job of a run.

    A running job saves a checkpoint first, and does not return to the queue.
    """
    from shoal.tools.submit import status as following
    from shoal.util.tables import plain_console, print_line

    record, active = following.cancel(run, now=now)
    how = "cancelled" if now else "saves a checkpoint and ends"
    how = how if active else "had ended before"
    print_line(plain_console(), f"job {', '.join(record.jobs)}: {how}")


@sites.command("ls", epilog=examples("shoal sites ls"))
def list_sites() -> None:
    """List the cluster profiles of Shoal and your own."""
    from shoal.tools.submit.documents import sites_document
    from shoal.tools.submit.site_catalog import entries

    show_document(sites_document(entries().values()))


@sites.command("show", epilog=examples("shoal sites show jean-zay"))
def show_site(name: _SiteName) -> None:
    """Print the file of a cluster profile."""
    from shoal.tools.submit.site_catalog import find_entry

    typer.echo(find_entry(name).text, nl=False)


@sites.command("new", epilog=examples("shoal sites new mycluster"))
def new_site(name: _SiteName) -> None:
    """Draft a cluster profile from the scheduler."""
    from shoal.tools.submit.schedulers import scheduler_here
    from shoal.tools.submit.site_catalog import folder
    from shoal.util.tables import plain_console, print_path

    path = folder() / f"{name}.toml"
    if path.name != f"{name}.toml" or path.exists():
        raise LaunchError(
            given=f"shoal sites new {name}",
            found=f"{path} is there already" if path.exists() else "not the name of a file",
            fix="choose another name, or remove that file",
        )
    text = scheduler_here().draft_site(name)
    with raised_as(
        LaunchError,
        given=f"shoal sites new {name}",
        fix="export XDG_CONFIG_HOME=DIR with a directory that you may write to",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print_path(plain_console(), f"{path}: look it over, then shoal submit --site {name} …")


def _sweep(path: Path | None) -> tuple[tuple[str, ...], ...]:
    """Return the words of each line of a file, without empty lines and comments."""
    import shlex

    if path is None:
        return ()
    with raised_as(
        LaunchError,
        given=f"--sweep {path}",
        fix="pass a file with the arguments of one job in each line, as in `--lr 0.1 --run runs/a`",
        errors=(OSError, ValueError),
    ):
        lines = [shlex.split(line, comments=True) for line in path.read_text().splitlines()]
    found = tuple(tuple(words) for words in lines if words)
    if not found:
        raise LaunchError(
            given=f"--sweep {path}",
            found="no line with arguments",
            fix="write the arguments of one job in each line, as in `--lr 0.1 --run runs/a`",
        )
    return found
