"""Environments that start a script on several hosts without a launcher of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import shoal
from helpers.job_variables import ON_EACH, ON_FIRST, variables
from shoal.distributed.cluster_env import detect
from shoal.distributed.cluster_env.job_environments import (
    JOB_ENVIRONMENTS,
    PORT,
    check_alone,
    read_nodes,
)
from shoal.distributed.initialize import _unused
from shoal.util import accelerator
from shoal.util.errors import LaunchError

HERE = socket.gethostname()
# One of these has RANK, and is refused because of it.
ALONE = [
    job.name for job in JOB_ENVIRONMENTS if job.name not in ("PAI", "Kubernetes", "Volcano (pytorch)")
]


@pytest.mark.parametrize("name", ALONE)
def test_one_of_several_hosts_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables(name, 1, tmp_path, here=HERE).items():
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


@pytest.mark.parametrize("name", ["PAI", "Kubernetes"])
def test_a_rank_that_counts_nodes_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables(name, 1, tmp_path, here=HERE).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(LaunchError, match="shoal run"), shoal.init(device="cpu"):
        pass


def test_a_rank_on_the_only_node_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "NPROC_PER_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="8 processes"), shoal.init(device="cpu"):
        pass


@pytest.mark.parametrize(
    "env",
    [
        {"SKYPILOT_NUM_NODES": "1"},
        {"PET_NNODES": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"PBS_NODEFILE": "/missing", "PBS_NUM_NODES": "1"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"SLURM_ARRAY_TASK_ID": "3"},
        {"SGE_TASK_ID": "3", "NHOSTS": "1"},
    ],
)
def test_one_host_is_alone(env: dict[str, str]) -> None:
    assert check_alone(env) == ""


@pytest.mark.parametrize("name", ON_FIRST)
def test_slots_of_one_host_are_one_host(name: str, tmp_path: Path) -> None:
    for first in (HERE, HERE.upper(), f"{HERE}.example", f"{HERE}.Example."):
        assert check_alone(variables(name, 0, tmp_path, first=first, here=HERE)) == ""


def test_numbers_and_addresses_are_different_hosts() -> None:
    for hosts in ("1 4 2 4", "10.0.0.1 4 10.0.0.2 4", "a.x 4 a.y 4"):
        assert "with 2 hosts" in check_alone({"LSB_MCPU_HOSTS": hosts})


@pytest.mark.parametrize("name", ON_FIRST)
def test_the_script_of_a_batch_job_is_warned(name: str, tmp_path: Path) -> None:
    line = f"one process in a job of {name} with 2 hosts: `"
    # Also by another name of its interface, and as Grid Engine without a file.
    for first, other in ((HERE, "other"), (f"{HERE}.example", "other"), ("a-ib0", "b-ib0")):
        warning = check_alone(variables(name, 0, tmp_path, first=first, here=other))
        assert warning.startswith(line)
    assert check_alone({"NHOSTS": "2"}).startswith(
        "one process in a job of Grid Engine with 2 hosts: `"
    )


@pytest.mark.parametrize("name", ["SKYPILOT_NUM_NODES", "SM_HOSTS", "PET_NNODES"])
def test_variables_that_cannot_be_read_are_refused(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} can't be read"):
        check_alone({name: "two"})


@pytest.mark.parametrize("name", ON_EACH)
def test_nodes_are_read(name: str, tmp_path: Path) -> None:
    for index in (0, 1):
        here = ("first", "127.9.9.9")[index]
        env = variables(name, index, tmp_path, here=here)
        nodes = read_nodes(env)
        assert nodes is not None
        assert (nodes.name, nodes.nodes, nodes.index) == (name, "2", index)
        own_name = name == "AWS Batch" and index == 0
        assert nodes.host == (HERE if own_name else "first")
        port = next((int(env[key]) for key in env if key.endswith("MASTER_PORT")), PORT)
        assert nodes.port == port
        assert read_nodes({**env, "LOCAL_RANK": "0"}) is None
        assert read_nodes({**env, "SHOAL_ALONE": "1"}) is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("[fd00::1]", ("fd00::1", 29500)),
        ("fd00::1", ("fd00::1", 29500)),
        ("[fd00::1]:1234", ("fd00::1", 1234)),
        (" pod-0.job ", ("pod-0.job", 29500)),
        ("pod-0.job:1234", ("pod-0.job", 1234)),
    ],
)
def test_an_address_may_have_brackets_and_a_port(
    address: str, expected: tuple[str, int], tmp_path: Path
) -> None:
    env = {**variables("Kubeflow Trainer", 1, tmp_path, here="a"), "PET_MASTER_ADDR": address}
    nodes = read_nodes(env)
    assert nodes is not None
    assert (nodes.host, nodes.port) == expected


def test_nodes_of_an_elastic_job_have_no_numbers() -> None:
    nodes = read_nodes({"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "pod-0.job:1234"})
    assert nodes is not None
    assert (nodes.nodes, nodes.index, nodes.host, nodes.port) == ("1:3", 0, "pod-0.job", 1234)


def test_variables_of_a_batch_system_are_not_read_for_nodes() -> None:
    assert read_nodes({"NHOSTS": "many"}) is None


@pytest.mark.parametrize("name", ON_FIRST)
def test_batch_systems_name_no_nodes(name: str, tmp_path: Path) -> None:
    assert read_nodes(variables(name, 0, tmp_path, here=HERE)) is None


@pytest.mark.parametrize(
    ("name", "variable", "value", "found"),
    [
        ("SkyPilot", "SKYPILOT_NODE_RANK", "2", "number of this node is 2, of 2"),
        ("SkyPilot", "SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n10.0.0.3", "3 addresses"),
        ("SageMaker", "SM_CURRENT_HOST", "algo-3", "algo-3 is not one of 2 host"),
        ("SageMaker", "SM_HOSTS", "5", "SM_HOSTS can't be read"),
        ("SageMaker", "SM_HOSTS", '"algo-1"', "SM_HOSTS can't be read"),
        ("PAI", "MASTER_PORT", "99999", "port 99999"),
        ("Kubernetes", "MASTER_PORT", "-1", "port -1"),
        ("PAI", "RANK", "two", "RANK can't be read"),
        ("Kubeflow Trainer", "PET_MASTER_PORT", "none", "PET_MASTER_PORT can't be read"),
    ],
)
def test_contradictions_are_refused(
    name: str, variable: str, value: str, found: str, tmp_path: Path
) -> None:
    env = {**variables(name, 1, tmp_path, here="127.9.9.9"), variable: value}
    with pytest.raises(LaunchError, match=found):
        read_nodes(env)


def test_unused_gpus_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "count", lambda: 8)
    one, gpu = detect({}, 4, list), torch.device("cuda", 0)
    assert _unused(one, gpu, 2) == "2 of 8 visible GPUs in use: `shoal run -n 4` uses all"
    assert _unused(one, gpu, 8) == ""
    assert _unused(one, torch.device("cpu"), 1) == ""


def test_a_started_job_knows_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_BATCH_JOB_ATTEMPT", "3")
    with shoal.init(device="cpu") as world:
        assert world.placement.attempt == 2


def test_a_launch_on_one_of_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    with pytest.raises(LaunchError, match="one of 2 hosts"):
        shoal.launch(pow, 2, 10, processes=1)
