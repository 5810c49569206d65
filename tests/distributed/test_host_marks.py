"""Environments that start a script on several hosts without a launcher of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import shoal
from shoal.distributed.cluster_env.host_marks import MARKS, check_alone
from shoal.util.errors import LaunchError

ELSEWHERE = "first.example\nsecond.example\n"
REFUSED = {
    "Kubeflow Trainer": {"PET_NNODES": "1:2", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
    "dstack": {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1"},
    "LeaderWorkerSet": {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"},
    "SageMaker": {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    "Volcano": {"VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1"},
    "HTCondor": {"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "1"},
    "PBS": {"PBS_NODEFILE": ELSEWHERE},
    "Grid Engine": {"PE_HOSTFILE": "first.example 4 all.q UNDEFINED\nsecond.example 4 all.q UNDEFINED\n"},
    "LSF": {"LSB_MCPU_HOSTS": "first 1 second 1"},
    "OAR": {"OAR_NODEFILE": ELSEWHERE},
}


def written(env: dict[str, str], folder: Path) -> dict[str, str]:
    """The same variables; a text of several lines is in a file."""
    found = {}
    for name, value in env.items():
        if "\n" in value:
            (folder / name).write_text(value)
            value = str(folder / name)
        found[name] = value
    return found


@pytest.mark.parametrize("name", [mark.name for mark in MARKS])
def test_one_of_several_hosts_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in written(REFUSED[name], tmp_path).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(LaunchError) as caught, shoal.init(device="cpu"):
        pass
    assert f"one of 2 hosts ({name})" in caught.value.found
    assert "shoal.init(alone=True)" in caught.value.fix
    with shoal.init(device="cpu", alone=True) as world:
        assert world.size == 1
    monkeypatch.setenv("SHOAL_ALONE", "1")
    with shoal.init(device="cpu") as world:
        assert world.size == 1


@pytest.mark.parametrize(
    "env",
    [
        {"SKYPILOT_NUM_NODES": "1"},
        {"PET_NNODES": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "algo-1"},
        {"PBS_NODEFILE": "/missing", "PBS_NUM_NODES": "1"},
        {"PBS_NODEFILE": f"{socket.gethostname()}\n" * 4},
        {"JOB_COMPLETION_INDEX": "3"},
        {"SLURM_ARRAY_TASK_ID": "3"},
        {"SGE_TASK_ID": "3", "NHOSTS": "1"},
    ],
)
def test_one_host_is_alone(env: dict[str, str], tmp_path: Path) -> None:
    assert check_alone(written(env, tmp_path)) == ""


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"PBS_NODEFILE": f"{socket.gethostname()}\nother\n"}, "PBS"),
        ({"PE_HOSTFILE": f"{socket.gethostname()}.example 4\nother 4\n"}, "Grid Engine"),
        ({"NHOSTS": "2"}, "Grid Engine"),
        ({"LSB_MCPU_HOSTS": f"{socket.gethostname()} 4 other 4"}, "LSF"),
    ],
)
def test_the_script_of_a_batch_job_is_warned(env: dict[str, str], name: str, tmp_path: Path) -> None:
    warning = check_alone(written(env, tmp_path))
    assert warning.startswith(f"one process in a job of {name} with 2 hosts: `")
