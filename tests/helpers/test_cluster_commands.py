"""The commands by which a person has a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cluster.slurm import missing

pytestmark = [pytest.mark.cluster, pytest.mark.system, pytest.mark.timeout(400)]

COMMAND = Path(__file__).parents[2] / "scripts" / "slurm-cluster"


class Person:
    """Someone who types commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(COMMAND), *command.split()],
            env={
                **os.environ,
                "SHOAL_CLUSTER": str(self.folder),
                "COLUMNS": "200",
                "PYTHON": sys.executable,
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def does(self, command: str) -> str:
        done = self(command)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def types(tmp_path: Path) -> Iterator[Person]:
    if missing():
        pytest.skip(missing())
    person = Person(tmp_path / "cluster")
    yield person
    person("down")


@pytest.mark.long
def test_a_cluster_from_up_to_down(types: Person) -> None:
    assert types.does("up --nodes 2").count("idle") == 2
    again = types("up")
    assert again.returncode != 0
    assert "is there already" in again.stderr
    both = ["node01", "node02"]
    assert sorted(types.does("run srun -N2 hostname").split()) == both
    for command in ("rate 200mbit", "delay 4", "run srun -N2 hostname", "rate off", "delay 0"):
        types.does(command)
    assert types("run false").returncode == 1
    for kill in ("cut node02", "kill node02", "kill node01 --slurmd"):
        types.does(kill)
    for heal in ("revive node02", "revive node01 --slurmd"):
        types.does(heal)
    assert sorted(types.does("run srun -N2 hostname").split()) == both
    types.does("down")
    assert not types.folder.exists()


def test_without_a_cluster_it_says_how_to_have_one(types: Person) -> None:
    done = types("run hostname")
    assert done.returncode != 0
    assert "scripts/slurm-cluster up" in done.stderr
