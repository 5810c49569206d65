"""A Slurm cluster on this machine, as commands: `scripts/slurm-cluster up`, and `--help`.

It stays until `down`. What it is and what it needs: `tests/helpers/cluster/slurm.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from helpers.cluster.slurm import Cluster, missing

FOLDER = "SHOAL_CLUSTER"
"""The variable that names a cluster's folder where several are wanted."""

Node = Annotated[str, typer.Argument(help="node01, node02 …")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def _folder() -> Path:
    return Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "shoal-cluster")


def _cluster() -> Cluster:
    try:
        return Cluster.find(_folder())
    except FileNotFoundError:
        raise typer.BadParameter(f"no cluster in {_folder()}: scripts/slurm-cluster up") from None


def _enter(name: str, command: Sequence[str]) -> None:
    cluster = _cluster()
    done = subprocess.run(
        cluster.inside(name, command, Path.cwd()), env=cluster.environment(), check=False
    )
    raise typer.Exit(done.returncode)


@app.command()
def up(nodes: Annotated[int, typer.Option(min=1, max=99)] = 4) -> None:
    """Start a cluster."""
    lacking = missing()
    if lacking:
        raise typer.BadParameter(lacking)
    if _folder().exists():
        raise typer.BadParameter(f"{_folder()} is there already: scripts/slurm-cluster down")
    Cluster(_folder(), nodes=nodes).__enter__()
    _enter("ctl", ["sinfo", "-N", "-l"])


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(command: list[str]) -> None:
    """Run a command on the login node: `run srun -N2 hostname`."""
    _enter("ctl", command)


@app.command()
def shell(node: Node = "ctl") -> None:
    """Open a shell on the login node, or on a node."""
    _enter(node, ["bash"])


@app.command()
def rate(rate: Annotated[str, typer.Argument(help="1gbit, 200mbit …, or off")]) -> None:
    """Narrow all cables, in each direction."""
    _cluster().network.rate(None if rate == "off" else rate)


@app.command()
def delay(milliseconds: float) -> None:
    """Let the way from any node to another and back take so long; 0: what it takes."""
    _cluster().delay(milliseconds / 1000)


@app.command()
def cut(node: Node) -> None:
    """Cut the cable of a node."""
    _cluster().network.cut(node)


@app.command()
def mend(node: Node) -> None:
    """Mend the cable of a node."""
    _cluster().network.mend(node)


@app.command()
def kill(node: Node, daemon: Annotated[bool, typer.Option("--slurmd")] = False) -> None:
    """Kill a node, or its slurmd alone."""
    cluster = _cluster()
    if daemon:
        cluster.kill_slurmd(node)
    else:
        cluster.kill(node)


@app.command()
def revive(node: Node, daemon: Annotated[bool, typer.Option("--slurmd")] = False) -> None:
    """Start a node again, or its slurmd alone."""
    cluster = _cluster()
    if daemon:
        cluster.revive_slurmd(node)
    else:
        cluster.revive(node)


@app.command()
def down() -> None:
    """End the cluster and all that runs on it."""
    _cluster().close()
    shutil.rmtree(_folder())


if __name__ == "__main__":
    app()
