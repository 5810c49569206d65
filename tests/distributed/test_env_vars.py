from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import pytest

from shoal.distributed.cluster_env import RUN_ID, Placement, expand_hosts, expand_tasks
from shoal.distributed.env_vars import placement, set_variables, worker_threads
from shoal.util.errors import LaunchError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}

# The task of rank 4 of `srun -N3 -n5 -c4`: two nodes with two tasks, the third with one.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "node[01-09]",
    "SLURM_STEP_NODELIST": "node[02-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_CPUS_PER_TASK": "4",
}


def read(env: Mapping[str, str], *, cpus: int = 8) -> Placement:
    return placement(env, cpus=cpus)


def test_no_launcher_is_a_world_of_one() -> None:
    found = read({"PATH": "/bin"})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (0, 1, 0, 1)
    assert (found.node, found.nodes, found.cores) == (0, 1, 8)
    assert (found.address, found.port, found.launcher, found.attempt) == ("127.0.0.1", 0, "none", 0)


def test_torchrun() -> None:
    found = read(TORCHRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.node, found.nodes, found.cores) == (1, 2, 2)
    assert (found.address, found.port, found.attempt) == ("node01", 29500, 2)
    assert found.launcher == "torchrun"
    assert "RANK=5" in found.reason
    assert "MASTER_ADDR=node01" in found.reason


def test_shoal_run_is_recognised_by_its_run_id() -> None:
    assert read({**TORCHRUN, "TORCHELASTIC_RUN_ID": RUN_ID}).launcher == "shoal run"


def test_torchrun_on_nodes_of_different_size() -> None:
    env = {**TORCHRUN, "WORLD_SIZE": "7", "RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    found = read(env)
    assert (found.node, found.nodes, found.local_size) == (1, 2, 3)


def test_without_group_variables_machines_are_counted() -> None:
    env = {k: v for k, v in TORCHRUN.items() if not k.startswith(("GROUP", "TORCHELASTIC"))}
    found = read(env)
    assert (found.node, found.nodes, found.attempt) == (1, 2, 0)


def test_a_world_of_one_by_hand_needs_two_variables() -> None:
    found = read({"RANK": "0", "WORLD_SIZE": "1"})
    assert (found.size, found.port, found.launcher) == (1, 0, "env://")


def test_torchrun_under_srun_wins() -> None:
    assert read({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_srun() -> None:
    found = read(SRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (4, 5, 0, 1)
    assert (found.node, found.nodes, found.cores) == (2, 3, 4)
    assert found.address == "node02"
    assert found.launcher == "srun"
    assert "SLURM_STEP_TASKS_PER_NODE=2(x2),1" in found.reason


def test_srun_after_a_requeue() -> None:
    assert read({**SRUN, "SLURM_RESTART_COUNT": "3"}).attempt == 3


def test_srun_with_an_address_chosen_by_the_user() -> None:
    found = read({**SRUN, "MASTER_ADDR": "node02-ib", "MASTER_PORT": "12345"})
    assert (found.address, found.port) == ("node02-ib", 12345)


def test_ports_differ_between_jobs_and_between_steps() -> None:
    ports = {
        read({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4700, 4720)
        for step in range(10)
    }
    assert len(ports) == 200
    assert min(ports) >= 10001
    assert max(ports) <= 20000


@pytest.mark.parametrize(
    ("change", "cpus", "cores"),
    [
        ({"SLURM_CPUS_PER_TASK": "4"}, 64, 4),
        # srun did not bind what sbatch asked for: the affinity is the truth.
        ({"SLURM_CPUS_PER_TASK": "8"}, 1, 1),
        # Bound to fewer than the node has: these are the task's own.
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "8"}, 3, 3),
        # Not bound: shared with the other task of node 0.
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "8", "SLURM_NODEID": "0"}, 64, 4),
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_NODEID": "0"}, 6, 3),
    ],
)
def test_cores_of_a_task(change: dict[str, str], cpus: int, cores: int) -> None:
    assert read({**SRUN, **change}, cpus=cpus).cores == cores


@pytest.mark.parametrize("step", [None, "", "4294967290", "4294967291"])
def test_batch_script_and_shells_are_not_tasks(step: str | None) -> None:
    env = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    found = read(env if step is None else {**env, "SLURM_STEP_ID": step})
    assert (found.launcher, found.size) == ("none", 1)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "RANK", "WORLD_SIZE"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, ["WORLD_SIZE=eight"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT=http"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, ["LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "", "WORLD_SIZE": "7"}, ["WORLD_SIZE=7", "GROUP_RANK"]),
        (
            {**SRUN, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"},
            ["SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2"],
        ),
        ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_NTASKS=5"]),
        ({**SRUN, "SLURM_PROCID": "5"}, ["SLURM_PROCID=5", "SLURM_NTASKS=5"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["SLURM_STEP_TASKS_PER_NODE=2(x2)"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE=two"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "node01"}, ["SLURM_STEP_NODELIST=node01"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[a-b]"}, ["SLURM_STEP_NODELIST=node[a-b]"]),
        ({**SRUN, "SLURM_NODEID": ""}, ["SLURM_NODEID"]),
    ],
)
def test_half_set_and_contradictory_environments(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        read(env)
    error = raised.value
    for text in named:
        assert text in f"{error.given} {error.found} {error.fix}"
    assert error.fix


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", ["node01"]),
        ("a,b-c,d", ["a", "b-c", "d"]),
        ("n[01-03,7],gpu5", ["n01", "n02", "n03", "n7", "gpu5"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_expand_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("2(x2),1", [2, 2, 1]), ("3,1(x2)", [3, 1, 1])]
)
def test_expand_tasks(text: str, tasks: list[int]) -> None:
    assert expand_tasks(text) == tasks


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
        assert os.environ["SHOAL_TEST_OLD"] == "x"
        assert os.environ["SHOAL_TEST_NEW"] == "y"
        assert "SHOAL_TEST_GONE" not in os.environ
        raise KeyError
    assert os.environ["SHOAL_TEST_OLD"] == "old"
    assert os.environ["SHOAL_TEST_GONE"] == "there"
    assert "SHOAL_TEST_NEW" not in os.environ
