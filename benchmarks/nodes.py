"""A Slurm cluster on this machine for benchmarks whose ranks communicate over a low-bandwidth link.

Each node is a network namespace. Needs root, slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.cluster.slurm import Cluster, missing


@contextmanager
def started(nodes: int) -> Iterator[Cluster]:
    """Start a cluster of `nodes` nodes, and stop it at the end."""
    reason = missing()
    if reason:
        raise SystemExit(reason)
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder) / "cluster", nodes=nodes) as made,
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
    """Run one rank of `script` on each node under srun, with more environment variables if given.

    Return its output.
    """
    nodes = len(cluster.nodes)
    command = [
        "srun",
        f"-N{nodes}",
        f"-n{nodes}",
        sys.executable,
        str(Path(script).resolve()),
        *arguments,
    ]
    done = subprocess.run(
        cluster.inside("ctl", command),
        env=cluster.environment(variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout
