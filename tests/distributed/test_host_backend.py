"""Groups with a backend for the device and one for the host, through which values of Python pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.scripts import Script
from shoal.distributed.device import backends

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, torch.distributed as dist
from helpers import simulated_device as simulated
from shoal._torch.c10d import device_types
from shoal.distributed import objects
from shoal.distributed.device import backends

simulated.setup()
rank = int(os.environ["RANK"])
device = torch.device(simulated.DEVICE, 0)
dist.init_process_group(backends("sim_fake", device))
for group in (dist.group.WORLD, dist.new_group([0, 1])):
    assert sorted(device_types(group)) == ["cpu", simulated.DEVICE]
    assert objects.gather({{"rank": rank}}, group) == [{{"rank": 0}}, {{"rank": 1}}]
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
def test_values_and_host_tensors_pass_through_the_host(start: Callable[..., Script]) -> None:
    """The device's own backend serves no tensor of the host: it would raise."""
    ended = start(SCRIPT, "hand").end()
    assert ended.out.count("ended with 0") == 2, ended.err


def test_a_backend_for_the_device_comes_with_one_for_the_host() -> None:
    for name, device, given in (
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),
        ("mpi", "cpu", "mpi"),
        ("nccl", "cuda:3", "cpu:gloo,cuda:nccl"),
        ("xccl", "xpu", "cpu:gloo,xpu:xccl"),
    ):
        assert backends(name, torch.device(device)) == given
