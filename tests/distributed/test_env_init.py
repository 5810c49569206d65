"""Placement by the variables of `env://`, alone and where a launcher has set its own too."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from helpers import recordings
from shoal.distributed.cluster_env import Placement
from shoal.distributed.env_vars import placement
from shoal.util.errors import LaunchError


def read(env: Mapping[str, str], *, cpus: int = 8, ancestors: tuple[str, ...] = ()) -> Placement:
    return placement(env, cpus=cpus, commands=lambda: ancestors)


def change(name: str, rank: int, **values: str) -> dict[str, str]:
    return {**recordings.load(name).environments[rank], **values}


ENV = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
# As the training operator of Kubeflow sets them; the other two as Kubernetes and Volcano do.
PODS: list[dict[str, str]] = [
    {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"},
    {"PET_NPROC_PER_NODE": "auto"},
    {"JOB_COMPLETION_INDEX": "1"},
    {"VC_TASK_INDEX": "0"},
]


def test_four_variables_are_enough() -> None:
    found = read(ENV)
    assert (found.rank, found.size, found.launcher) == (1, 3, "env://")
    assert (found.address, found.port, found.meeting) == ("node01", 29500, None)
    assert found.unsettled == ("local_rank", "local_size", "node", "nodes")
    settled = found.settled(["a", "a", "b"], [0, 0, 0])
    assert (settled.local_rank, settled.local_size, settled.node, settled.nodes) == (1, 2, 0, 2)
    assert settled.unsettled == ()


@pytest.mark.parametrize("left_out", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_each_of_the_four_variables_is_needed(left_out: str) -> None:
    with pytest.raises(LaunchError, match=f"{left_out} not set"):
        read({k: v for k, v in ENV.items() if k != left_out})


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_with_one_process(pod: dict[str, str]) -> None:
    found = read({**ENV, **pod})
    assert (found.local_rank, found.local_size, found.node, found.nodes) == (0, 1, 1, 3)
    assert found.unsettled == ()
    assert "one process per pod" in found.reason


def test_a_pod_that_is_to_run_torchrun() -> None:
    with pytest.raises(LaunchError, match="with torchrun") as raised:
        read({**ENV, "PET_NPROC_PER_NODE": "8"})
    assert "PET_NPROC_PER_NODE=8" in raised.value.given


def test_a_local_rank_by_hand_is_kept() -> None:
    """Several processes of a pod have numbers too; they have to number the ranks of a machine."""
    found = read({**ENV, "LOCAL_RANK": "0", "VC_TASK_INDEX": "0"})
    assert found.unsettled == ("local_size", "node", "nodes")
    settled = found.settled(["a", "a", "b"], [1, 0, 0])
    assert (settled.local_rank, settled.local_size) == (0, 2)
    with pytest.raises(LaunchError, match="unset LOCAL_RANK") as raised:
        found.settled(["a", "a", "b"], [0, 0, 0])
    assert "ranks 0, 1 are on the same machine, and their local ranks are 0, 0" in raised.value.found


@pytest.mark.parametrize("name", ["open-mpi-4-in-salloc", "mpich-4-in-salloc"])
def test_machines_of_mpi_are_settled_by_its_ranks(name: str) -> None:
    recorded = recordings.load(name)
    found = [read(env, ancestors=tuple(recorded.ancestors)) for env in recorded.environments]
    settled = [one.settled(["a", "a", "b", "b", "c"], [0, 1, 0, 1, 0]) for one in found]
    assert [one.node for one in settled] == [0, 0, 1, 1, 2]
    assert [one.local_rank for one in settled] == [one.local_rank for one in found]


@pytest.mark.parametrize(
    "by_hand",
    [
        {"RANK": "3", "WORLD_SIZE": "5"},
        {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"},
        {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "node01-ib", "MASTER_PORT": "4000"},
    ],
)
@pytest.mark.parametrize("name", ["slurm-uneven-2x2-1", "open-mpi-4-in-salloc"])
def test_variables_that_repeat_what_a_launcher_says(name: str, by_hand: dict[str, str]) -> None:
    """Of four and more tutorials: `RANK=$SLURM_PROCID`. The address by hand is taken."""
    found = read(change(name, 3, **by_hand))
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 5, 1, 2)
    assert found.launcher in ("srun", "Open MPI")
    assert "MASTER_ADDR" not in by_hand or (found.address, found.port) == ("node01-ib", 4000)


@pytest.mark.parametrize("wrong", [{"RANK": "0"}, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}])
@pytest.mark.parametrize("name", ["slurm-uneven-2x2-1", "open-mpi-4-in-salloc"])
def test_variables_that_contradict_a_launcher(name: str, wrong: dict[str, str]) -> None:
    """`RANK=0 WORLD_SIZE=1` of a shell would make N worlds of one."""
    right = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"}
    with pytest.raises(LaunchError) as raised:
        read(change(name, 3, **{**right, **wrong}))
    (variable,) = wrong
    assert raised.value.found.endswith(f"which contradicts {variable}")
    assert raised.value.fix.startswith("unset RANK WORLD_SIZE LOCAL_RANK: ")
