"""Groups with a backend for the device and one for the host, through which values of Python pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.ranks import free_port
from shoal.distributed.backend import backends

SCRIPT = """
import sys
import torch, torch.distributed as dist
from helpers import simulated_device as simulated
from shoal._torch.c10d import device_types
from shoal.distributed import objects
from shoal.distributed.backend import backends

simulated.setup()
rank, port = int(sys.argv[1]), int(sys.argv[2])
device = torch.device(simulated.DEVICE, 0)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group(backends("sim_fake", device), store=store, rank=rank, world_size=2)
for group in (dist.group.WORLD, dist.new_group([0, 1])):
    assert sorted(device_types(group)) == ["cpu", simulated.DEVICE]
    assert objects.gather({"rank": rank}, group) == [{"rank": 0}, {"rank": 1}]
    assert objects.broadcast(rank, group) == 0
    assert objects.gather_numbers(rank + 5, group) == [5, 6]
    objects.barrier(group)
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2, 2, 2]
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.processes
def test_values_and_host_tensors_pass_through_the_host() -> None:
    """The device's own backend serves no tensor of the host: it would raise."""
    command = [sys.executable, "-c", SCRIPT]
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port],
            cwd=Path(__file__).parents[1],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.parametrize(
    ("name", "device", "given"),
    [
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),
        ("mpi", "cpu", "mpi"),
        ("nccl", "cuda:3", "cpu:gloo,cuda:nccl"),
        ("xccl", "xpu", "cpu:gloo,xpu:xccl"),
    ],
)
def test_a_backend_for_the_device_comes_with_one_for_the_host(
    name: str, device: str, given: str
) -> None:
    assert backends(name, torch.device(device)) == given
