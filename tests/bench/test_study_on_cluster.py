"""A scaling study on a real Slurm: submitted, run on one node and on two, collected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cluster.slurm import Cluster
from helpers.commands import wait_for
from shoal.tools.bench.scaling.directory import load_study

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(600)]

STUDY = (
    "dense:width=16",
    "-n",
    "1,2",
    "--steps",
    "4",
    "--warmup",
    "2",
    "--rounds",
    "1",
    "--batch",
    "8",
)
SLURM = ("--submit", "--tasks-per-node", "1", "--study", "s")


def shoal(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *arguments]
    variables = {"XDG_CONFIG_HOME": str(folder / "config"), "COLUMNS": "200"}
    return cluster.run(command, folder=folder, variables=variables)


@pytest.mark.long
def test_a_study_is_submitted_and_collected(cluster: Cluster, tmp_path: Path) -> None:
    """A job for each number of nodes; of these one is cancelled, is named, and is submitted again."""
    done = shoal(cluster, tmp_path, "bench", "scaling", *STUDY, *SLURM, "--directive=--hold")
    assert done.returncode == 0, done.stderr
    assert "1 node, 1 training(s) on 1 process(es)" in done.stdout
    assert "2 nodes, 1 training(s) on 2 process(es)" in done.stdout
    one, two = (
        json.loads((tmp_path / f"s/submitted/nodes-{nodes}/jobs/1/job.json").read_text())["jobs"][0]
        for nodes in (1, 2)
    )
    slurm(cluster, "scancel", two)
    slurm(cluster, "scontrol", "release", one)
    wait(cluster, tmp_path)
    first = shoal(cluster, tmp_path, "bench", "collect", "s")
    assert first.returncode == 1, first.stdout + first.stderr
    assert "1 process, without a comparison" in first.stdout
    assert "1 of 2 training runs have no result yet" in first.stdout
    assert f"job {two}: 1 cancelled: shoal logs s/submitted/nodes-2" in first.stdout
    again = shoal(cluster, tmp_path, "bench", "scaling", *STUDY, *SLURM)
    assert "2 nodes, 1 training(s)" in again.stdout, again.stdout + again.stderr
    assert "1 node, " not in again.stdout
    wait(cluster, tmp_path)
    second = shoal(cluster, tmp_path, "bench", "collect", "s")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "2 processes give" in second.stdout
    check(tmp_path / "s")


def slurm(cluster: Cluster, *command: str) -> str:
    done = cluster.run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait(cluster: Cluster, folder: Path) -> None:
    """Until Slurm has nothing more to do."""

    def told() -> str:
        logs = "\n".join(path.read_text() for path in folder.rglob("log.txt"))
        return f"{logs}\n{slurm(cluster, 'squeue')}"

    wait_for(lambda: slurm(cluster, "squeue", "--noheader").strip() == "", 200, every=0.1, told=told)


def check(folder: Path) -> None:
    """It is as complete as one that ran here."""
    study = load_study(folder)
    one, two = study.repeats()
    assert (len(one.hosts), len(set(two.hosts))) == (1, 2)
    assert one.measured is not None
    assert two.measured is not None
    assert one.measured.loss == pytest.approx(two.measured.loss, rel=1e-5)
    assert two.measured.parts["communication"] > 0
    assert study.missing() == []
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "results.csv", "throughput-strong.svg", "parts.png"} <= names
    assert "plain" in (folder / "index.html").read_text()
