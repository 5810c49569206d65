"""A Slurm cluster on this machine: each node is a network namespace with a slurmd and a link.

Needs root, slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shoal
from disturbed import SCRIPT
from helpers.cluster.slurm import Cluster, missing
from shoal.distributed.cluster_env import expand_hosts

_PAUSE = 0.1


@contextmanager
def started(nodes: int, **options: Any) -> Iterator[Cluster]:
    """Start a cluster of `nodes` nodes, and stop it at the end."""
    reason = missing()
    if reason:
        raise SystemExit(reason)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder) / "cluster", nodes=nodes, **options) as made,
    ):
        yield made


def limit(cluster: Cluster, rate: str) -> None:
    """Limit each node's link to `rate` as tc spells it (`200mbit`), or `none`."""
    cluster.network.rate(None if rate == "none" else rate)


def run_ranks(
    cluster: Cluster,
    script: str,
    arguments: Sequence[str],
    *,
    seconds: float = 3600,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run one rank of `script` on each node under srun; return its output."""
    nodes = len(cluster.nodes)
    ranks = ["srun", f"-N{nodes}", f"-n{nodes}", sys.executable, str(Path(script).resolve())]
    done = subprocess.run(
        cluster.inside("ctl", [*ranks, *arguments]),
        env=cluster.environment(variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def results_of(cluster: Cluster, script: str, arguments: Sequence[str], **options: Any) -> Any:
    """Run ranks of `script` with --results FILE; return what `write_results` wrote, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        output = run_ranks(cluster, script, [*arguments, "--results", str(results)], **options)
        return json.loads(results.read_text()), output


def write_results(world: shoal.World, results: Path, found: Any) -> None:
    """Write what rank 0 has found."""
    if world.is_rank_zero:
        results.write_text(json.dumps(found))


def submit(cluster: Cluster, home: Path, *options: str) -> str:
    """Submit the disturbed training with these options; return the number of the job."""
    shutil.copy(SCRIPT, home)
    variables = {name: str(home / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    command = [sys.executable, "-m", "shoal", "submit", "--no-copy", *options]
    done = cluster.run(command, folder=home, variables=variables)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.split()[1].rstrip(":")


def nodes_of(cluster: Cluster, job: str) -> list[str]:
    """Return the nodes of a job that runs."""
    names = cluster.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()
    return expand_hosts(names) if names else []


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step of rank 0."""

    attempt: int
    step: int
    at: float


def read_lines(home: Path) -> list[Line]:
    """Return the steps of rank 0, in the order of attempts."""
    file = home / "samples-0.jsonl"
    found = []
    for text in file.read_text().splitlines() if file.exists() else ():
        attempt, step, _, _, at = json.loads(text)
        found.append(Line(attempt=attempt, step=step, at=at))
    return sorted(found, key=lambda line: (line.attempt, line.step))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not within {seconds:.0f} s")
        time.sleep(_PAUSE)
