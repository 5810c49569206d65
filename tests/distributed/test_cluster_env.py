"""Placement under environments recorded from real launchers, and as the documents have them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import recordings
from shoal.distributed.cluster_env import LAUNCHERS, Placement, order_of_detection
from shoal.distributed.device import choose_device
from shoal.distributed.env_vars import placement
from shoal.util.errors import LaunchError


def read(env: Mapping[str, str], *, cpus: int = 8, ancestors: tuple[str, ...] = ()) -> Placement:
    return placement({"HOME": "/nowhere", **env}, cpus=cpus, commands=lambda: ancestors)


def read_all(name: str) -> list[Placement]:
    recorded = recordings.load(name)
    return [
        read(env, cpus=cpus, ancestors=tuple(recorded.ancestors))
        for env, cpus in zip(recorded.environments, recorded.cpus, strict=True)
    ]


def change(name: str, rank: int = 0, /, **values: str) -> dict[str, str]:
    return {**recordings.load(name).environments[rank], **values}


# Name: (launcher, local ranks, local sizes, nodes), in rank order, as the command line asked for.
RECORDED = {
    "slurm-uneven-2x2-1": ("srun", "01010", "22221", "00112"),
    "slurm-uneven-3-1x2": ("srun", "01200", "33311", "00012"),
    "slurm-cyclic": ("srun", "0012", "3133", "0100"),
    "slurm-plane": ("srun", "010234", "551555", "001000"),
    "slurm-arbitrary": ("srun", "0010", "2121", "2021"),
    "slurm-4x3-gpus": ("srun", "012012012012", "3" * 12, "000111222333"),
    "slurm-one-gpu-each": ("srun", "0123", "4444", "0000"),
    "slurm-sub-step": ("srun", "0101", "2222", "0011"),
    "slurm-salloc-srun": ("srun", "010101", "222222", "001122"),
    "slurm-heterogeneous": ("srun", "0100", "2211", "0012"),
    "slurm-pmi2": ("srun", "010", "221", "001"),
    "slurm-pmix": ("srun", "010", "221", "001"),
    "open-mpi-4": ("Open MPI", "01", "22", "00"),
    "open-mpi-5": ("Open MPI", "01", "22", "00"),
    "open-mpi-4-in-salloc": ("Open MPI", "01010", "22221", "00112"),
    "mpich-4": ("Hydra", "01", "22", "00"),
    "mpich-5": ("Hydra", "01", "22", "00"),
    "intel-mpi-2021": ("Hydra", "01", "22", "00"),
    "mpich-4-in-salloc": ("Hydra", "01010", "22221", "00114"),  # until the ranks have met
    "torchrun": ("torchrun", "01", "22", "00"),
    "torchrun-under-srun": ("torchrun", "0101", "2222", "0011"),
    "slurm-by-hand": ("srun", "0120", "3331", "0001"),
    "slurm-one-task-of-four": ("srun", "0", "1", "0"),
    "env-by-hand": ("env://", "00", "11", "01"),  # until the ranks have met
    "ray-train": ("Ray", "01", "12", "01"),  # until then too
}


@pytest.mark.parametrize("name", RECORDED)
def test_every_rank_knows_its_place_and_where_all_will_meet(name: str) -> None:
    """They look where the first one will be, at its ports, for a job of one name."""
    launcher, local_ranks, local_sizes, nodes = RECORDED[name]
    found = read_all(name)
    assert [one.rank for one in found] == list(range(len(local_ranks)))
    assert {(one.size, one.launcher) for one in found} == {(len(local_ranks), launcher)}
    assert "".join(str(one.local_rank) for one in found) == local_ranks
    assert "".join(str(one.local_size) for one in found) == local_sizes
    assert "".join(str(one.node) for one in found) == nodes
    if found[0].meeting is None:
        assert len({(one.address, one.port, one.meeting) for one in found}) == 1
        return
    met = [one.meeting for one in found if one.meeting is not None]
    assert len(met) == len(found)
    assert len({(one.job, one.ports) for one in met}) == 1
    host = recordings.load(name).environments[0].get("SLURMD_NODENAME", "127.0.0.1")
    assert all(host in one.hosts for one in met)


def test_all_recordings_are_used_and_names_of_jobs_differ() -> None:
    others = {"slurm-1-of-2-per-node", "slurm-batch", "slurm-salloc-shell"}
    assert set(recordings.names("")) == {*RECORDED, *others}
    jobs = {name: read_all(name)[0].meeting for name in RECORDED}
    met = [meeting.job for meeting in jobs.values() if meeting is not None]
    assert len(set(met)) == len(met)


def test_lightning_with_one_device_sets_no_rank() -> None:
    """Its variables with `strategy="ddp", devices=1` in lightning 2.6.6."""
    env = {"WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    found = read({**env, "MASTER_PORT": "12910"})
    assert (found.rank, found.size) == (0, 1)


def test_an_actor_of_ray_is_alone_whatever_started_its_raylet() -> None:
    raylet = {"RAY_RAYLET_PID": "7"}
    found = read({**change("slurm-cyclic", 2), **raylet})
    assert (found.rank, found.size, found.launcher, found.job) == (0, 1, "Ray", "")
    # A `shoal run` in it is nearer.
    assert read({**change("torchrun"), **raylet}).launcher == "torchrun"


@pytest.mark.parametrize("name", ["open-mpi-4-in-salloc", "mpich-4-in-salloc"])
def test_machines_of_mpi_are_settled_by_its_ranks(name: str) -> None:
    found = read_all(name)
    settled = [one.settled(["a", "a", "b", "b", "c"], [0, 1, 0, 1, 0]) for one in found]
    assert [one.node for one in settled] == [0, 0, 1, 1, 2]
    assert [one.local_rank for one in settled] == [one.local_rank for one in found]


@pytest.mark.parametrize("name", ["slurm-batch", "slurm-salloc-shell"])
def test_a_batch_script_and_a_shell_under_salloc_are_no_tasks(name: str) -> None:
    """FAILURES 12. `python train.py` leaves all tasks of the job but one idle, which is warned of."""
    (found,) = read_all(name)
    assert (found.launcher, found.size) == ("none", 1)
    assert "not a task of a step" in found.reason
    for given, nodes, tasks in (("6", "3", 6), ("", "3", 3), ("1", "1", 1)):
        found = read(change(name, 0, SLURM_NTASKS=given, SLURM_JOB_NUM_NODES=nodes))
        assert found.size == 1
        assert bool(found.warning) == (tasks > 1)
        if tasks > 1:
            assert f"a Slurm job with room for {tasks} (job " in found.warning
            assert "`srun python train.py`" in found.warning


def test_srun_inside_salloc_is_srun_in_a_step_of_fewer_nodes() -> None:
    """FAILURES 12: of the four nodes of the job the step has two."""
    found = read_all("slurm-sub-step")
    assert recordings.load("slurm-sub-step").environments[0]["SLURM_NODELIST"] == "node[01-04]"
    assert {(one.launcher, one.address, one.nodes) for one in found} == {("srun", "node03", 2)}


def test_ntasks_1_with_ntasks_per_node_2_is_refused_naming_both() -> None:
    """FAILURES 11."""
    with pytest.raises(LaunchError) as raised:
        read_all("slurm-1-of-2-per-node")
    assert raised.value.given == "SLURM_NTASKS=1, SLURM_NTASKS_PER_NODE=2"


def test_a_step_of_one_task_in_a_larger_allocation() -> None:
    """Unlike `--ntasks=1 --ntasks-per-node=2`, for which the job has no cores."""
    (found,) = read_all("slurm-one-task-of-four")
    assert (found.size, found.launcher) == (1, "srun")
    assert found.warning == "a step of 1 task(s), in a job with room for 2 on each node"
    no_room = change("slurm-one-task-of-four", 0, SLURM_CPUS_PER_TASK="2")
    with pytest.raises(LaunchError, match="drop --ntasks"):
        read(no_room)


def test_one_visible_gpu_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILURES 13: local rank 3 uses device 0 of what it sees."""
    recorded = recordings.load("slurm-one-gpu-each")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in recorded.environments] == ["0", "1", "2", "3"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = read_all("slurm-one-gpu-each")
    assert found[3].local_rank == 3
    assert {choose_device(None, one).value for one in found} == {torch.device("cuda:0")}


def test_nodes_in_another_order_after_a_requeue() -> None:
    """FAILURES 14: all look for rank 0 where it is now, for another attempt of the job."""
    before = change("slurm-uneven-2x2-1", 4)
    moved = {"SLURM_STEP_NODELIST": "node[07,02-03]", "SLURM_RESTART_COUNT": "1"}
    found = read({**before, **moved})
    assert (found.address, found.attempt, found.rank) == ("node07", 1, 4)
    assert found.meeting != read(before).meeting


def test_no_program_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILURES 15: inside a container there is no scontrol."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert [one.size for one in read_all("slurm-sub-step")] == [4] * 4


@pytest.mark.parametrize("left_out", ["SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"])
def test_variables_that_a_container_dropped_are_named(left_out: str) -> None:
    """FAILURES 15: and never N worlds of one."""
    env = change("slurm-uneven-2x2-1", 1)
    del env[left_out]
    with pytest.raises(LaunchError) as raised:
        read(env)
    assert left_out in raised.value.found


def test_steps_of_one_job_and_elements_of_an_array_are_apart() -> None:
    """FAILURES 16. Slurm numbered them so: the last element has the array's own number."""
    first, second = read(change("slurm-cyclic")), read(change("slurm-cyclic", SLURM_STEP_ID="1"))
    assert first.port != second.port
    assert first.meeting
    assert second.meeting
    assert first.meeting.job != second.meeting.job
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "17"}
    last = {**array, "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "16"}
    elements = [read(change("slurm-cyclic", **variables)) for variables in (array, last)]
    assert len({one.port for one in elements}) == len({one.meeting for one in elements}) == 2


@pytest.mark.parametrize(
    "name", ["slurm-cyclic", "slurm-batch", "open-mpi-4-in-salloc", "mpich-4-in-salloc"]
)
def test_attempts_of_a_job_of_slurm_know_each_other(name: str) -> None:
    """What ranks of an earlier one hold, on a node that was cut off, is taken over."""
    env = change(name, MASTER_ADDR="a", MASTER_PORT="1")
    first, second = read(env), read({**env, "SLURM_RESTART_COUNT": "1"})
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.job == second.job
    assert env["SLURM_JOB_ID"] in first.job
    assert read(change("open-mpi-4")).job == ""


@pytest.mark.parametrize(
    ("env", "named"),
    [
        # The tasks and the ranks of this node contradict each other.
        (change("slurm-cyclic", 2, SLURM_GTIDS="0,1,2"), ["SLURM_GTIDS=0,1,2", "SLURM_PROCID=2"]),
        (change("slurm-cyclic", SLURM_GTIDS="0,x"), ["SLURM_GTIDS=0,x"]),
        (change("slurm-cyclic", SLURM_STEP_NUM_TASKS="8"), ["SLURM_STEP_NUM_TASKS=8"]),
        (
            change("slurm-cyclic", SLURM_STEP_TASKS_PER_NODE="0,4", SLURM_GTIDS=""),
            ["SLURM_STEP_TASKS_PER_NODE=0,4"],
        ),
        # N launchers of one machine, each for itself.
        (
            change("torchrun", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2"),
            ["SLURM_STEP_NUM_TASKS=2", "WORLD_SIZE=2"],
        ),
        (change("torchrun", OMPI_COMM_WORLD_SIZE="4"), ["OMPI_COMM_WORLD_SIZE=4"]),
        (change("torchrun", PMI_SIZE="4"), ["PMI_SIZE=4"]),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            ["WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=4"],
        ),
        (
            change("slurm-cyclic")
            | change("open-mpi-4", OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_LOCAL_SIZE="1"),
            ["OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4"],
        ),
        # Half set.
        (change("open-mpi-4", OMPI_COMM_WORLD_LOCAL_SIZE=""), ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (change("open-mpi-4", PMIX_NAMESPACE=""), ["PMIX_NAMESPACE"]),
        (change("mpich-4", PMI_RANK=""), ["PMI_RANK"]),
        # A process manager that says too little: the wrong kind, or none of those above.
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ["PMI_SIZE=4", "MPI_LOCALRANKID"]),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, ["PMIX_RANK=1", "OMPI_COMM_WORLD_SIZE"]),
        # Nobody to know the job by.
        (change("mpich-4"), ["MASTER_ADDR", "MASTER_PORT"]),
        (change("slurm-cyclic", MASTER_PORT="-1"), ["MASTER_PORT=-1", "from 1 to 65535"]),
        # Values that can't be.
        *(
            (change(name, **{variable: value}), [f"{variable}={value}"])
            for name, variable, value in (
                ("open-mpi-4", "OMPI_COMM_WORLD_LOCAL_SIZE", "0"),
                ("open-mpi-4", "OMPI_COMM_WORLD_RANK", "7"),
                ("slurm-cyclic", "MASTER_PORT", "0"),
                ("slurm-cyclic", "MASTER_PORT", "70000"),
                ("slurm-cyclic", "SHOAL_PORTS", "80"),
                ("slurm-cyclic", "SHOAL_PORTS", "9000-70000"),
            )
        ),
    ],
)
def test_contradictory_and_half_set_environments(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        read(env)
    error = raised.value
    for text in named:
        assert text in f"{error.given} {error.found} {error.fix}"


def test_each_job_may_use_every_port_of_a_small_range() -> None:
    """So two jobs on one machine find enough ports where there are just enough for both."""
    for count, job in itertools.product([1, 2, 3, 4, 6, 8], range(50)):
        env = change("slurm-cyclic", SHOAL_PORTS=f"30000-{29999 + count}", SLURM_JOB_ID=str(job))
        meeting = read(env).meeting
        assert meeting is not None
        assert sorted(meeting.ports) == list(range(30000, 30000 + count)), job


def test_an_address_and_a_port_of_ones_own() -> None:
    found = read(change("open-mpi-4", MASTER_ADDR="ib0", MASTER_PORT="4000"))
    assert (found.address, found.port) == ("ib0", 4000)
    # These are enough where the job has no name.
    assert read(change("mpich-4", MASTER_ADDR="ib0", MASTER_PORT="4000")).address == "ib0"


def test_without_a_list_of_hosts_rank_0_publishes_its_address() -> None:
    """mpirun over ssh: the machine of mpirun is a guess, and so is no certainty."""
    env = {k: v for k, v in change("open-mpi-4-in-salloc").items() if not k.startswith("SLURM")}
    meeting = read(env).meeting
    assert meeting is not None
    assert meeting.hosts == ("10.77.0.1",)
    assert meeting.directory == "/nowhere/.cache/shoal/meeting"
    assert read({**env, "SHOAL_MEETING": "/shared"}).meeting != meeting


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


PALS = variables(
    "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 PALS_NODEID=1 PMI_RANK=5 PMI_SIZE=8 "
    "PALS_APID=6c3e5b3a-26f5-4aa2-9d5e-3f1f6f3c2a11"
)
JSM = variables(
    "JSM_NAMESPACE_RANK=5 JSM_NAMESPACE_SIZE=8 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=4 "
    "OMPI_COMM_WORLD_RANK=5 PMIX_NAMESPACE=1 LSB_JOBID=1234"
) | {"LSB_MCPU_HOSTS": "batch1 1 h41n01 42 h41n02 42"}
FLUX = variables(
    "FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=8 FLUX_JOB_NNODES=2 FLUX_JOB_ID=12345678"
)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [(PALS, "PALS"), (JSM, "jsrun"), (FLUX, "Flux"), ({**change("slurm-cyclic"), **FLUX}, "Flux")],
)
def test_launchers_known_from_documents(env: dict[str, str], launcher: str) -> None:
    found = read(env)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.node, found.nodes, found.launcher) == (1, 2, launcher)


@pytest.mark.parametrize("env", [PALS, JSM, FLUX])
def test_each_of_their_variables_is_needed(env: dict[str, str]) -> None:
    optional = {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "LSB_MCPU_HOSTS"}
    marks = {mark for launcher in LAUNCHERS for mark in launcher.marks}
    for name in env.keys() - optional - marks:
        with pytest.raises(LaunchError, match=name.replace("LOCAL_SIZE", "LOCAL")):
            read({k: v for k, v in env.items() if k != name})
    with pytest.raises(LaunchError, match="--tasks-per-node"):  # nodes that differ
        read({**FLUX, "FLUX_JOB_SIZE": "7"})


def test_hosts_of_pbs_and_lsf(tmp_path: Path) -> None:
    assert read(JSM).meeting is not None
    nodefile = tmp_path / "nodes"
    nodefile.write_text("x1\nx1\nx2\nx2\n")
    assert read({**PALS, "PBS_NODEFILE": str(nodefile)}).address == "x1"
    assert read({**PALS, "PBS_NODEFILE": "/nowhere/nodes"}).address == ""


def test_the_order_of_detection_can_be_printed() -> None:
    lines = order_of_detection().splitlines()
    assert len(lines) == len(LAUNCHERS)
    assert lines[0].startswith("LOCAL_WORLD_SIZE or TORCHELASTIC_RUN_ID: torchrun, shoal run; first")
    assert lines[-2].startswith("SLURM_STEP_ID or SLURM_PROCID: srun; after these")
    assert lines[-1].startswith("RANK or LOCAL_RANK: env://; last")


# idr_torch takes the first node's number of tasks for every node's, so it is asked where they agree.
EVEN = ["slurm-4x3-gpus", "slurm-one-gpu-each", "slurm-sub-step", "slurm-salloc-srun", "torchrun"]


@pytest.mark.parametrize(
    "name", [*EVEN, "slurm-uneven-2x2-1", "slurm-arbitrary", "slurm-heterogeneous"]
)
def test_the_same_as_idr_torch(name: str) -> None:
    idr: Any = pytest.importorskip("idr_torch")
    recorded = recordings.load(name)
    for env, found in zip(recorded.environments, read_all(name), strict=True):
        # Not monkeypatch: idr_torch sets variables of its own, which must go too.
        with mock.patch.dict(os.environ, env):
            assert (idr.rank, idr.size, idr.local_rank) == (found.rank, found.size, found.local_rank)
            if name in EVEN:
                assert idr.local_size == found.local_size
            if name.startswith("slurm"):
                assert idr.num_nodes == found.nodes
                assert name == "slurm-arbitrary" or idr.master_addr == found.address
            if name == "slurm-4x3-gpus":
                assert idr.cpus_per_task == found.cores == 2
                assert idr.gpu_ids == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["slurm-4x3-gpus", "slurm-uneven-2x2-1"])
def test_variables_that_idr_torch_has_set_do_not_hide_srun(name: str) -> None:
    """They look like those of torchrun, with the first node's number of tasks for each node."""
    idr: Any = pytest.importorskip("idr_torch")
    once = "idr_torch.api.modifiers.auto_master_addr_port.env_variables_set"
    recorded = recordings.load(name)
    for env, cpus, found in zip(recorded.environments, recorded.cpus, read_all(name), strict=True):
        with mock.patch.dict(os.environ, env), mock.patch(once, False):
            assert idr.rank == found.rank
            again = read({**env, **{each: os.environ[each] for each in SET_BY_IDR}}, cpus=cpus)
        assert (again.launcher, again.local_rank, again.local_size) == (
            *("srun", found.local_rank, found.local_size),
        )
        assert (again.node, again.nodes, again.cores) == (found.node, found.nodes, found.cores)


SET_BY_IDR = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
