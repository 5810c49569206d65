"""Scaling studies as jobs of Slurm's: the plan, its scripts under stand-ins, what is collected."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batch import Fakes, place, run_script, write
from shoal import cli
from shoal.bench import grid
from shoal.bench.allocations import Asked, Room, allocations, room
from shoal.bench.figures import Repeat, apart
from shoal.bench.folder import Study, begin, load
from shoal.bench.grid import Options
from shoal.errors import CheckpointError, LaunchError, ShoalError
from shoal.submit.catalog import find_entry, load as load_site
from shoal.submit.request import Request, Turn
from shoal.submit.site import Partition, Site

MINI = """
default = "main"
[partitions.main]
gpus = 4
cores = 32
cpus_per_gpu = 8
nodes = 4
"""
GPUS = Partition(name="main", gpus=4, cores=32, cpus_per_gpu=8, nodes=4)
CORES = Partition(name="main", gpus=0, cores=32)
FULL = Options(model="dense", processes=(1, 2, 4, 8), backends=("gloo", "mpi"), batch=8, rounds=2)


def site(partition: Partition | None) -> Site:
    if partition is None:
        return Site(name="plain")
    return Site(name="mini", default="main", partitions={"main": partition})


@pytest.mark.parametrize(
    ("partition", "asked", "found"),
    [
        (GPUS, Asked(), (4, True, 8, 4)),
        (GPUS, Asked(gpus=2, cpus=3), (2, True, 3, 4)),
        (GPUS, Asked(gpus=0), (32, False, 1, 4)),
        (GPUS, Asked(tasks=8), (8, False, 4, 4)),
        (CORES, Asked(), (32, False, 1, None)),
        (CORES, Asked(cpus=5), (6, False, 5, None)),
        (None, Asked(gpus=4), (4, True, None, None)),
        (None, Asked(tasks=6), (6, False, None, None)),
    ],
)
def test_a_node_takes_what_the_site_says_or_the_user(
    partition: Partition | None, asked: Asked, found: tuple[int, bool, int | None, int | None]
) -> None:
    fits = room(site(partition), asked)
    assert (fits.tasks, fits.gpus, fits.cpus, fits.most) == found


@pytest.mark.parametrize(
    ("partition", "asked", "told"),
    [
        (None, Asked(), "how many processes a node takes"),
        (GPUS, Asked(partition="fast"), "mini has main"),
    ],
)
def test_what_nobody_knows_of_a_node_is_asked_for(
    partition: Partition | None, asked: Asked, told: str
) -> None:
    with pytest.raises(LaunchError, match=told):
        room(site(partition), asked)


FOUR = Room(where="mini", tasks=4, gpus=True, cpus=8, most=4)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((1, 32), "at most 4 nodes with 4 processes each: 16"),
        ((5,), "5 processes are not as many on each of 2 nodes"),
    ],
)
def test_sizes_that_do_not_fit_the_nodes_are_refused(sizes: tuple[int, ...], told: str) -> None:
    FOUR.check((1, 2, 4, 6, 16))
    with pytest.raises(LaunchError, match=told):
        FOUR.check(sizes)


def test_what_fits_on_as_many_nodes_shares_them_in_the_order_of_the_plan(tmp_path: Path) -> None:
    missing = begin(tmp_path, FULL).missing()
    found = {each.name: each for each in allocations(missing, FOUR)}
    assert list(found) == ["nodes-1", "nodes-1-mpi", "nodes-2", "nodes-2-mpi"]
    assert (found["nodes-1"].sizes, found["nodes-1"].per_node) == ([1, 2, 4], 4)
    assert (found["nodes-2-mpi"].sizes, found["nodes-2-mpi"].per_node) == ([8], 4)
    one = found["nodes-1"].trainings
    assert [number for number, _ in one] == [0, 0, 0, 1, 1, 1]
    assert [each for _, each in one[:3]] == [each for _, each in one[3:]][::-1]
    assert sorted(map(str, missing)) == sorted(str(t) for each in found.values() for t in each.trainings)


TURNS = tuple(Turn(args=(word,), processes=size, log=f"{word}.txt") for word, size in ("a1", "b2", "c4"))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Slurm's commands, and a directory to work in."""
    fakes = Fakes(tmp_path / "fakes")
    for name, value in fakes.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    sites = tmp_path / "config/shoal/sites"
    sites.mkdir(parents=True)
    (sites / "mini.toml").write_text(MINI)
    (tmp_path / "work/jobs/1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    fakes.set("sbatch", out="42\n")
    return fakes
