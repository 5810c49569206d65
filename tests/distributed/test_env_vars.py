"""Placement by variables as documents have them, alone and where a launcher has set its own too."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from helpers import recordings
from helpers.scripts import Script
from shoal.distributed.cluster_env import RUN_ID, Placement, expand_hosts, expand_tasks
from shoal.distributed.env_vars import placement, set_variables, worker_threads
from shoal.util.errors import LaunchError

ENV = "RANK=1 WORLD_SIZE=3 MASTER_ADDR=node01 MASTER_PORT=29500"
LOCAL = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node01 MASTER_PORT=29500"
GROUP = "GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=none"
TORCHRUN = f"{LOCAL} {GROUP}"
# The task of rank 4 of `srun -N3 -n5 -c4`: two nodes with two tasks, the third with one.
TASK = (
    "SLURM_JOB_ID=4711 SLURM_PROCID=4 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 "
    "SLURM_NODELIST=node[01-09] SLURM_STEP_NODELIST=node[02-04] "
    "SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_CPUS_PER_TASK=4"
)
SRUN = f"{TASK} SLURM_STEP_ID=0"
# As the training operator of Kubeflow sets them; the other two as Kubernetes and Volcano do.
PODS = (
    "PET_NNODES=3 PET_NODE_RANK=1 PET_NPROC_PER_NODE=1",
    *("PET_NPROC_PER_NODE=auto", "JOB_COMPLETION_INDEX=1", "VC_TASK_INDEX=0"),
)


def read(text: str, *, cpus: int = 8, rank: dict[str, str] | None = None) -> Placement:
    """The placement by some variables; later ones replace earlier ones."""
    return placement({**(rank or {}), **dict(word.split("=", 1) for word in text.split())}, cpus=cpus)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "PATH=/bin",
            {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1, "cores": 8}
            | {"address": "127.0.0.1", "port": 0, "launcher": "none", "attempt": 0},
        ),
        ("RANK=0 WORLD_SIZE=1", {"size": 1, "port": 0, "launcher": "env://"}),
        (
            TORCHRUN,
            {"rank": 5, "size": 8, "local_rank": 1, "local_size": 4, "node": 1, "nodes": 2, "cores": 2}
            | {"address": "node01", "port": 29500, "launcher": "torchrun", "attempt": 2},
        ),
        (f"{TORCHRUN} TORCHELASTIC_RUN_ID={RUN_ID}", {"launcher": "shoal run"}),
        (
            f"{TORCHRUN} WORLD_SIZE=7 RANK=6 LOCAL_RANK=2 LOCAL_WORLD_SIZE=3",
            {"node": 1, "nodes": 2, "local_size": 3},  # nodes of different size
        ),
        (LOCAL, {"node": 1, "nodes": 2, "attempt": 0}),  # machines are counted
        (f"{SRUN} {TORCHRUN}", {"launcher": "torchrun"}),
        (
            SRUN,
            {"rank": 4, "size": 5, "local_rank": 0, "local_size": 1, "node": 2, "nodes": 3, "cores": 4}
            | {"address": "node02", "launcher": "srun"},
        ),
        (f"{SRUN} SLURM_RESTART_COUNT=3", {"attempt": 3}),
        (
            "SGE_CELL=default JOB_ID=7 SGE_TASK_ID=2 RESTARTED=3",
            {"attempt": 3, "job": "sge-default-7.2"},
        ),
        ("JOB_ID=7 RESTARTED=3", {"attempt": 0, "job": ""}),
        ("PBS_JOBID=7[1].pbs RESTARTED=3", {"attempt": 3, "job": "pbs-7[1].pbs"}),
        (
            f"{SRUN} MASTER_ADDR=node02-ib MASTER_PORT=12345",
            {"address": "node02-ib", "port": 12345},
        ),
        # A batch script, and shells of Slurm's own.
        *(
            (f"{TASK} SLURM_PROCID=0{step}", {"launcher": "none", "size": 1})
            for step in ("", *(f" SLURM_STEP_ID={number}" for number in ("", 4294967290, 4294967291)))
        ),
        # Machines are settled when the ranks have met.
        (
            ENV,
            {"rank": 1, "size": 3, "launcher": "env://", "address": "node01", "port": 29500}
            | {"meeting": None, "unsettled": ("local_rank", "local_size", "node", "nodes")},
        ),
        *(
            (
                f"{ENV} {pod}",
                {"local_rank": 0, "local_size": 1, "node": 1, "nodes": 3, "unsettled": ()},
            )
            for pod in PODS
        ),
    ],
)
def test_a_place_by_variables(text: str, wanted: dict[str, object]) -> None:
    found = read(text)
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_the_reason_names_variables() -> None:
    for text, named in (
        (TORCHRUN, ["RANK=5", "MASTER_ADDR=node01"]),
        (SRUN, ["SLURM_STEP_TASKS_PER_NODE=2(x2),1"]),
        *((f"{ENV} {pod}", ["one process per pod"]) for pod in PODS),
    ):
        assert all(name in read(text).reason for name in named)


def test_ports_differ_between_jobs_and_between_steps() -> None:
    ports = {
        read(f"{SRUN} SLURM_JOB_ID={job} SLURM_STEP_ID={step}").port
        for job in range(4700, 4720)
        for step in range(10)
    }
    assert len(ports) == 200
    assert min(ports) >= 10001
    assert max(ports) <= 20000


@pytest.mark.parametrize(
    ("change", "cpus", "cores"),
    [
        ("SLURM_CPUS_PER_TASK=4", 64, 4),
        # srun did not bind what sbatch asked for: the affinity is the truth.
        ("SLURM_CPUS_PER_TASK=8", 1, 1),
        # Bound to fewer than the node has: these are the task's own.
        ("SLURM_CPUS_PER_TASK= SLURM_CPUS_ON_NODE=8", 3, 3),
        # Not bound: shared with the other task of node 0.
        ("SLURM_CPUS_PER_TASK= SLURM_CPUS_ON_NODE=8 SLURM_NODEID=0", 64, 4),
        ("SLURM_CPUS_PER_TASK= SLURM_NODEID=0", 6, 3),
    ],
)
def test_cores_of_a_task(change: str, cpus: int, cores: int) -> None:
    assert read(f"{SRUN} {change}", cpus=cpus).cores == cores


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("RANK=0", "RANK=0 WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=2", "MASTER_ADDR MASTER_PORT"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4 RANK"),
        ("LOCAL_RANK=0", "LOCAL_RANK=0 RANK WORLD_SIZE"),
        *(
            (f"{ENV} {left_out}=", left_out)
            for left_out in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        ),
        (f"{ENV} PET_NPROC_PER_NODE=8", "PET_NPROC_PER_NODE=8 torchrun"),
        (f"{TORCHRUN} RANK=8", "RANK=8 WORLD_SIZE=8"),
        (f"{TORCHRUN} RANK=-1", "RANK=-1"),
        (f"{TORCHRUN} LOCAL_RANK=4", "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4"),
        (f"{TORCHRUN} WORLD_SIZE=eight", "WORLD_SIZE=eight"),
        (f"{TORCHRUN} MASTER_PORT=http", "MASTER_PORT=http"),
        (f"{TORCHRUN} MASTER_PORT=70000", "MASTER_PORT=70000"),
        (f"{TORCHRUN} LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0"),
        (f"{TORCHRUN} LOCAL_WORLD_SIZE=16", "LOCAL_WORLD_SIZE=16 WORLD_SIZE=8"),
        (f"{TORCHRUN} GROUP_WORLD_SIZE= WORLD_SIZE=7", "WORLD_SIZE=7 GROUP_RANK"),
        (
            f"{SRUN} SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=2",
            "SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=2",
        ),
        (f"{SRUN} WORLD_SIZE=8", "WORLD_SIZE=8 SLURM_NTASKS=5"),
        (f"{SRUN} SLURM_PROCID=5", "SLURM_PROCID=5 SLURM_NTASKS=5"),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_STEP_TASKS_PER_NODE=2(x2)"),
        (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=two", "SLURM_STEP_TASKS_PER_NODE=two"),
        (f"{SRUN} SLURM_STEP_NODELIST=node01", "SLURM_STEP_NODELIST=node01"),
        (f"{SRUN} SLURM_STEP_NODELIST=node[a-b]", "SLURM_STEP_NODELIST=node[a-b]"),
        (f"{SRUN} SLURM_NODEID=", "SLURM_NODEID"),
    ],
)
def test_half_set_and_contradictory_environments(text: str, named: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read(text)
    error = raised.value
    for name in named.split():
        assert name in f"{error.given} {error.found} {error.fix}"
    assert error.fix


def test_machines_are_settled_when_the_ranks_have_met() -> None:
    settled = read(ENV).settled(["a", "a", "b"], [0, 0, 0])
    assert (settled.local_rank, settled.local_size, settled.node, settled.nodes) == (1, 2, 0, 2)
    assert settled.unsettled == ()
    # Several processes of a pod have numbers too; they have to number the ranks of a machine.
    found = read(f"{ENV} LOCAL_RANK=0 VC_TASK_INDEX=0")
    assert found.unsettled == ("local_size", "node", "nodes")
    settled = found.settled(["a", "a", "b"], [1, 0, 0])
    assert (settled.local_rank, settled.local_size) == (0, 2)
    with pytest.raises(LaunchError, match="unset LOCAL_RANK") as raised:
        found.settled(["a", "a", "b"], [0, 0, 0])
    assert "ranks 0, 1 are on the same machine, and their local ranks are 0, 0" in raised.value.found


SCRIPT = """
import torch, shoal

with shoal.init() as world:
    place = world.placement
    assert world.all_reduce(torch.ones(())).item() == world.size
    said = (world.rank, place.local_rank, place.local_size, place.node, place.nodes, place.launcher)
    for one in world.gather(said):
        world.print(one)
"""


@pytest.mark.full(rows="all")
@pytest.mark.processes
@pytest.mark.parametrize("own", ["", "LOCAL_RANK=0"])
def test_four_variables_make_a_world(own: str, start: Callable[..., Script]) -> None:
    """And local ranks that are the same raise on all ranks."""
    ended = start(SCRIPT, "hand", own=own).end()
    assert ended.out.count(f"ended with {1 if own else 0}") == 2, ended.err
    if own:
        said = "found: ranks 0, 1 are on the same machine, and their local ranks are 0, 0"
        assert (ended.err.count(said), ended.err.count("fix:   unset LOCAL_RANK")) == (2, 2)
    else:
        assert "(0, 0, 2, 0, 1, 'env://')\n(1, 1, 2, 0, 1, 'env://')\n" in ended.out


TASKS = ("slurm-uneven-2x2-1", "open-mpi-4-in-salloc")


def test_variables_that_repeat_what_a_launcher_says() -> None:
    """Of four and more tutorials: `RANK=$SLURM_PROCID`. The address by hand is taken."""
    by_hand = "RANK=3 WORLD_SIZE=5"
    for name in TASKS:
        rank = recordings.load(name).environments[3]
        for more in ("", " LOCAL_RANK=1", " MASTER_ADDR=node01-ib MASTER_PORT=4000"):
            found = read(by_hand + more, rank=rank)
            assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 5, 1, 2)
            assert found.launcher in ("srun", "Open MPI")
            assert "MASTER" not in more or (found.address, found.port) == ("node01-ib", 4000)


@pytest.mark.parametrize("wrong", ["RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0"])
@pytest.mark.parametrize("name", TASKS)
def test_variables_that_contradict_a_launcher(name: str, wrong: str) -> None:
    """`RANK=0 WORLD_SIZE=1` of a shell would make N worlds of one."""
    rank = recordings.load(name).environments[3]
    with pytest.raises(LaunchError) as raised:
        read(f"RANK=3 WORLD_SIZE=5 LOCAL_RANK=1 {wrong}", rank=rank)
    assert raised.value.found.endswith(f"which contradicts {wrong.partition('=')[0]}")
    assert raised.value.fix.startswith("unset RANK WORLD_SIZE LOCAL_RANK: ")


def test_lists_of_hosts_and_tasks() -> None:
    known: dict[str, list[Any]] = {
        "node01": ["node01"],
        "a,b-c,d": ["a", "b-c", "d"],
        "n[01-03,7],gpu5": ["n01", "n02", "n03", "n7", "gpu5"],
        "n[098-101]": ["n098", "n099", "n100", "n101"],
        "r[1-2]n[1-2]-ib": ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"],
    }
    assert {text: expand_hosts(text) for text in known} == known
    known = {"4": [4], "2(x2),1": [2, 2, 1], "3,1(x2)": [3, 1, 1]}
    assert {text: expand_tasks(text) for text in known} == known


def test_threads_are_shared_unless_the_user_says_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))
    assert worker_threads(1, {}) == {"OMP_NUM_THREADS": str(cores)}
    assert worker_threads(10 * cores, {}) == {"OMP_NUM_THREADS": "1"}
    assert worker_threads(2, {"OMP_NUM_THREADS": "7"}) == {}


def test_set_variables_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_OLD", "old")
    monkeypatch.setenv("SHOAL_TEST_GONE", "there")
    monkeypatch.delenv("SHOAL_TEST_NEW", raising=False)
    values = {"SHOAL_TEST_OLD": "x", "SHOAL_TEST_NEW": "y", "SHOAL_TEST_GONE": None}
    with suppress(KeyError), set_variables(values):
        assert {name: os.environ.get(name) for name in values} == values
        raise KeyError
    before = {"SHOAL_TEST_OLD": "old", "SHOAL_TEST_NEW": None, "SHOAL_TEST_GONE": "there"}
    assert {name: os.environ.get(name) for name in values} == before
