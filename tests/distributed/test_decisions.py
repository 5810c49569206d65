"""Every decision of `shoal.init` says why, and what it passed over, as values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from helpers import recordings
from shoal.distributed.cluster_env import LAUNCHERS, Placement
from shoal.distributed.cpu_affinity import threads
from shoal.distributed.device import RankDevice, choose_backend, choose_device, why_shared
from shoal.distributed.env_vars import placement
from shoal.distributed.initialize import check_limits, choose_layout
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError

REFUSED = "slurm-1-of-2-per-node"


def by_name(choices: tuple[Decision[Any], ...]) -> dict[str, Decision[Any]]:
    found = {choice.what: choice for choice in choices}
    assert len(found) == len(choices), "two choices of one thing"
    return found


def read(name: str, rank: int = -1, more: Mapping[str, str] | None = None) -> Placement:
    recorded = recordings.load(name)
    env = {"HOME": "/nowhere", **recorded.environments[rank], **(more or {})}
    return placement(env, cpus=recorded.cpus[rank], commands=lambda: recorded.ancestors)


@pytest.mark.parametrize("name", sorted(set(recordings.names("")) - {REFUSED}))
def test_choices_are_what_the_placement_has_and_name_a_variable(name: str) -> None:
    for rank, env in enumerate(recordings.load(name).environments):
        found = read(name, rank)
        made = by_name(found.choices)
        launcher = made["launcher"]
        assert launcher.value == found.launcher
        assert any(f"{variable}={value}" in launcher.reason for variable, value in env.items())
        rejected = [one for one in LAUNCHERS if one.name in launcher.rejected]
        assert len(rejected) == len(LAUNCHERS) - (found.launcher != "none")
        for one in rejected:
            assert any(mark in launcher.rejected[one.name] for mark in one.marks)
        assert made["cores"].value == found.cores
        assert all(choice.reason for choice in made.values())
        if found.meeting is not None:
            assert made["address"].value == found.meeting.hosts
            assert made["port"].value == found.meeting.ports
        else:
            assert made["address"].value == (found.address,)


def test_what_was_passed_over_says_why() -> None:
    why = by_name(read("torchrun-under-srun").choices)["launcher"].rejected["srun"]
    assert why == "SLURM_STEP_ID=0, SLURM_PROCID=1 is set too, but torchrun is checked earlier"
    # A shell of Slurm's own, in which the site's default process manager may have set variables.
    shell = {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}
    for more in ({}, {"PMIX_RANK": "0"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}):
        launcher = by_name(read("slurm-salloc-shell", more=shell | more).choices)["launcher"]
        assert launcher.value == "none"
        assert launcher.rejected["srun"].startswith("SLURM_STEP_ID=4294967290")


@pytest.mark.parametrize(
    ("name", "more", "what", "value", "reason"),
    [
        ("slurm-4x3-gpus", {}, "cores", 2, "SLURM_CPUS_PER_TASK=2"),
        ("slurm-cyclic", {}, "cores", 2, "SLURM_CPUS_ON_NODE=3, the 2 that it is bound to"),
        ("slurm-sub-step", {}, "cores", 1, "SLURM_CPUS_ON_NODE=2, divided by 2 task(s)"),
        ("slurm-sub-step", {}, "address", ("node03",), "SLURM_STEP_NODELIST=node[03-04]"),
        ("open-mpi-4", {}, "address", ("127.0.0.1",), "OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        ("open-mpi-4-in-salloc", {}, "address", ("node01", "node02", "node03"), "SLURM_JOB_NODELIST"),
        ("slurm-cyclic", {"MASTER_ADDR": "ib0"}, "address", ("ib0",), "given: MASTER_ADDR=ib0"),
        ("slurm-cyclic", {"MASTER_PORT": "4000"}, "port", (4000,), "given: MASTER_PORT=4000"),
        ("slurm-cyclic", {"SHOAL_PORTS": "3000-3000"}, "port", (3000,), "SHOAL_PORTS=3000-3000"),
        ("torchrun", {"MASTER_PORT": "4000"}, "port", (4000,), "torchrun: MASTER_PORT=4000"),
    ],
)
def test_who_said_so(name: str, more: dict[str, str], what: str, value: object, reason: str) -> None:
    choice = by_name(read(name, more=more).choices)[what]
    assert choice.value == value
    assert reason in choice.reason
    if what in ("address", "port") and not more and name != "torchrun":
        assert f"MASTER_{'ADDR' if what == 'address' else 'PORT'} is not set" in str(choice.rejected)


def test_a_meeting_that_nobody_names_tells_what_to_set() -> None:
    env = recordings.load("open-mpi-4-in-salloc").environments[0]
    env = {name: value for name, value in env.items() if not name.startswith("SLURM")}
    made = by_name(placement({"HOME": "/nowhere", **env}, cpus=2, commands=list).choices)
    assert made["meeting"].value == "/nowhere/.cache/shoal/meeting"
    assert "SHOAL_MEETING is not set" in made["meeting"].reason
    assert "SLURM_JOB_NODELIST" in made["address"].reason


@pytest.mark.parametrize(
    ("visible", "local_rank", "given", "device", "reason", "rejected"),
    [
        (0, 3, None, "cpu", "no GPU is visible", {"cuda"}),
        (4, 0, None, "cuda:0", "local rank 0, 4 visible GPUs", {"cpu"}),
        (4, 3, None, "cuda:3", "local rank 3, 4 visible GPUs", {"cpu"}),
        (1, 3, None, "cuda:0", "the only visible GPU", {"cpu"}),  # one for each task
        (4, 3, "cpu", "cpu", GIVEN, set()),
        (4, 3, "cuda:1", "cuda:1", GIVEN, set()),
        (4, 3, "cuda", "cuda:3", "given: cuda; local rank 3", set()),
        (1, 3, torch.device("cuda"), "cuda:0", "given: cuda; ", set()),
        (0, 0, "meta", "meta", GIVEN, set()),
        (2, 3, None, "2 visible GPUs, none for local rank 3", "", set()),
        (2, 3, "cuda", "2 visible GPUs, none for local rank 3", "", set()),
        (0, 3, "cuda", "no GPU", "", set()),
        (0, 3, "gpu", "device", "", set()),
    ],
)
def test_the_device_goes_by_local_rank(
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    local_rank: int,
    given: str | torch.device | None,
    device: str,
    reason: str,
    rejected: set[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    alone = placement({}, cpus=1)
    place = replace(alone, rank=local_rank, size=8, local_rank=local_rank, local_size=4)
    if not reason:
        with pytest.raises(LaunchError, match=device) as raised:
            choose_device(given, place)
        assert "device='cpu'" in raised.value.fix
        return
    choice = choose_device(given, place)
    assert choice.value == torch.device(device)
    assert choice.reason.startswith(reason)
    assert set(choice.rejected) == rejected


SET = "the script has called torch."


@pytest.mark.parametrize(
    ("default", "current", "given", "device", "reason"),
    [
        ("cuda:1", 0, None, "cuda:1", f"{SET}set_default_device('cuda:1')"),
        ("cuda", 0, None, "cuda:3", f"{SET}set_default_device('cuda'): cuda; local rank 3"),
        ("cpu", 2, None, "cpu", f"{SET}set_default_device('cpu')"),  # said, though a GPU is visible
        (None, 2, None, "cuda:2", f"{SET}cuda.set_device(2)"),
        (None, 0, None, "cuda:3", "local rank 3, 4 visible GPUs"),
        ("cuda", 2, "cuda:1", "cuda:1", GIVEN),
        ("cpu", 2, "cuda:1", "cuda:1", GIVEN),  # as without a call
        ("cuda:4", 0, None, "no such GPU: 4 visible", "set_default_device('cuda:4')"),
        ("meta", 0, None, "no values", "shoal.init() after torch.set_default_device('meta')"),
        ("meta", 0, "cpu", "create tensors on meta", "device='cpu' after"),
        ("cuda:2", 0, "cuda:1", "create tensors on cuda:2", "device='cuda:1' after"),
    ],
)
def test_a_device_that_is_set_before_is_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
    default: str | None,
    current: int,
    given: str | None,
    device: str,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    place = replace(placement({}, cpus=1), rank=3, size=8, local_rank=3, local_size=4)
    with nullcontext() if default is None else torch.device(default):
        if " " in device:
            with pytest.raises(LaunchError, match=device) as raised:
                choose_device(given, place)
            assert reason in raised.value.given
            assert given or raised.value.fix.startswith("torch.set_default_device(")
        else:
            choice = choose_device(given, place)
            assert choice.value == torch.device(device)
            assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("everyone", "found"),
    [
        ([("a", "cpu", "", ""), ("a", "cpu", "", "")], ""),
        ([("a", "cuda", "1", "3b"), ("a", "cuda", "2", "af"), ("b", "cuda", "1", "3b")], ""),
        (
            [("a", "cuda", "1", "3b"), ("a", "cuda", "2", "af"), ("a", "cuda", "1", "3b")],
            "ranks 0 and 2 share a GPU of a",
        ),
        (
            [("a", "cuda", "1", "3b"), ("b", "cuda", "2", "3b"), ("a", "cuda", "3", "3b")],
            "ranks 0 and 2 have slices (MIG) of one GPU of a",
        ),
        ([("a", "xpu", "", ""), ("a", "xpu", "", "")], ""),  # not known
        ([("a", "cuda", "1", "3b"), ("b", "cpu", "", "")], "rank 1, on b, has no GPU"),
    ],
)
def test_gpus_that_nccl_can_not_use(everyone: list[tuple[str, str, str, str]], found: str) -> None:
    assert why_shared([RankDevice(*each) for each in everyone]) == found


def test_slices_of_one_gpu_differ_by_their_uuid_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [
        SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
        for uuid in ("5f", "6a")
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: slices[device.index])
    one, other = (RankDevice.of(torch.device("cuda", index)) for index in range(2))
    assert (one.uuid, one.pci, other.uuid, other.pci) == ("5f", "0000:3b:00.0", "6a", "0000:3b:00.0")
    assert RankDevice.of(torch.device("cpu"))[2:] == ("", "")


def test_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_backend(None, torch.device("cpu"))
    assert (choice.value, choice.reason) == ("gloo", "the device is a CPU")
    assert "CUDA" in choice.rejected["nccl"]
    assert choose_backend("gloo", torch.device("cpu")).reason == GIVEN
    gpu = torch.device("cuda", 0)
    choice = choose_backend(None, gpu, "ranks 0 and 1 share a GPU of a")
    assert (choice.value, choice.reason) == ("gloo", "ranks 0 and 1 share a GPU of a")
    assert set(choice.rejected) == {"nccl"}
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: name == "nccl")
    choice = choose_backend(None, gpu)
    assert (choice.value, set(choice.rejected)) == ("nccl", {"gloo"})
    with pytest.raises(LaunchError, match="nccl"):
        choose_backend("gloo", gpu)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    assert choose_backend(None, torch.device("xpu", 0)).value == "xccl"
    assert choose_backend(None, torch.device("mps", 0)).value == "gloo"


@pytest.mark.parametrize(
    ("now", "variable", "launcher", "value", "reason", "rejected"),
    [
        # torchrun's own 1 is not inherited, unless the script has chosen since.
        (1, "1", "torchrun", 4, "this rank's cores", {"OMP_NUM_THREADS=1"}),
        (3, "1", "torchrun", 3, "given: set in the process", {"OMP_NUM_THREADS=1"}),
        (2, "2", "torchrun", 2, "given: OMP_NUM_THREADS=2", set()),
        (1, "1", "srun", 1, "given: OMP_NUM_THREADS=1", set()),  # the user's word, or the site's
        (8, "8", "srun", 8, "given: OMP_NUM_THREADS=8", set()),
        (2, "2", "shoal run", 2, "given: OMP_NUM_THREADS=2", set()),
        (3, "2", "srun", 3, "given: set in the process", {"OMP_NUM_THREADS=2"}),
        # torch counted cores that others use too.
        (16, "", "srun", 4, "this rank's cores; OMP_NUM_THREADS", {"16"}),
        (2, "", "srun", 2, "torch's own number", set()),
        (1, "", "Open MPI", 1, "torch's own number", set()),  # the script has chosen fewer
    ],
)
def test_threads_of_a_rank_with_four_cores_and_who_set_them(
    now: int, variable: str, launcher: str, value: int, reason: str, rejected: set[str]
) -> None:
    """FAILURES 27: torchrun's own OMP_NUM_THREADS=1 is not silently inherited."""
    choice = threads(4, now=now, variable=variable, launcher=launcher)
    assert choice.value == value
    assert choice.reason.startswith(reason)
    assert set(choice.rejected) == rejected


@pytest.mark.parametrize(
    ("layout", "text", "reason"),
    [
        ("replicate=-1", "replicate=4", "replicate=-1, the default"),
        ("replicate=2,tensor=2", "replicate=2,tensor=2", GIVEN),
        (shoal.Layout(tensor=2, shard=-1), "shard=2,tensor=2", "given: shard=-1,tensor=2, on 4"),
    ],
)
def test_the_layout(layout: str | shoal.Layout, text: str, reason: str) -> None:
    choice = choose_layout(layout, 4)
    assert str(choice.value) == text
    assert choice.reason.startswith(reason)


def test_a_world_keeps_them() -> None:
    assert check_limits(600.0, 3600.0).reason.startswith("the default")
    assert check_limits(600.0, 60.0).reason.startswith(GIVEN)
    with shoal.init(device="cpu", deterministic=True, backend="gloo") as world:
        made = by_name(world.decisions)
        assert made["device"].reason == made["backend"].reason == GIVEN
        assert (made["deterministic"].value, made["deterministic"].reason) == (True, GIVEN)
        assert made["layout"].value == world.layout
        assert made["cores"].value == world.placement.cores
        assert made["threads"].value == torch.get_num_threads()
        assert {"launcher", "address", "time limits"} <= set(made)
    with shoal.init(device="cpu") as world:
        assert by_name(world.decisions)["deterministic"].value is False
    assert len({*world.decisions, *world.decisions}) == len(world.decisions)
