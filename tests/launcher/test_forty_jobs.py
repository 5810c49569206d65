"""Forty short jobs on four nodes that they share, with hardly enough ports for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.long, pytest.mark.timeout(600)]

JOBS = 40

SCRIPT = """
import os, sys
import torch, shoal

with shoal.init() as world:
    job = int(sys.argv[1])
    for _ in range(20):
        total = world.all_reduce(torch.full((1000,), float(job)))
    assert bool((total == world.size * job).all()), total
    assert world.gather(job) == [job] * world.size
    world.print(f"job {job}, {world.size} ranks")
"""


def test_forty_jobs_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """FAILURES 16: no clash of ports, no talk with another job, and nothing is left."""
    (tmp_path / "short.py").write_text(SCRIPT)
    run = f"srun {sys.executable} short.py"
    one_node, two_nodes = "-N1 -n2", "-N2 -n3"
    lines = [
        f"sbatch -J j{job} -o log-{job} {two_nodes if job % 2 else one_node} --wrap '{run} {job}'"
        for job in range(JOBS)
    ]
    done = cluster.run(
        ["bash", "-ec", "\n".join(lines)], folder=tmp_path, variables={"SHOAL_PORTS": "17501-17508"}
    )
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not cluster.run(["squeue", "-h"]).stdout, timeout=500)
    for job in range(JOBS):
        said = (tmp_path / f"log-{job}").read_text()
        assert said.splitlines()[-1] == f"job {job}, {3 if job % 2 else 2} ranks", said
    assert not [node for node in cluster.nodes if cluster.running(node, "short.py")]
