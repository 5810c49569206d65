"""Steps on a simulated accelerator: no operation mixes devices, and few block the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TENSOR_FSDP = "[shoal.TensorParallel(), shoal.FSDP()]"
CONTEXT = "shoal.ContextParallel(check=False)"
PIPELINE = "shoal.Pipeline(split_points=('blocks.1', 'blocks.2', 'blocks.3'))"
SEQUENCES = ("--net", "Sequences")
EIGHT = ("--micro-batches", "8")
ONE_READ = {"item in shoal/strategies/correction.py:read": 3}
"""Loss, count and norm, in one transfer before the optimizer step."""
OFFLOADED = {
    "copy sim to cpu in shoal/strategies/comm_timing.py:marked": 26,  # of gradients, by FSDP2
    "copy cpu to sim in shoal/strategies/mesh_reducer.py:totals": 1,  # of their norm
    **ONE_READ,
}
EVALUATED = {
    "item in shoal/training/evaluation.py:means": 4,  # loss and accuracy, in one transfer
    "item in shoal/training/evaluation.py:evaluate": 1,
}
FEW: list[tuple[int, str, str, tuple[str, ...], dict[str, int]]] = [
    (1, "replicate=1", "shoal.SingleProcess()", ("--fused",), {}),
    (
        8,
        "shard=4,expert=2",
        "[shoal.ExpertParallel(), shoal.FSDP()]",
        ("--fused", "--net", "Mixture", "--micro-batches", "1"),
        # The numbers of rows for two ranks and from them, in one transfer for each of two layers.
        {"item in shoal/strategies/expert_parallel/experts.py:_dispatched": 8},
    ),
]
MORE = [
    (1024, "shard=256,tensor=4", TENSOR_FSDP, (), ONE_READ),
    (8, "replicate=2,pipeline=4", PIPELINE, (*EIGHT, "--rank", "1"), ONE_READ),
    (1024, "replicate=256,pipeline=4", PIPELINE, ("--fused", *EIGHT), {}),
    (8, "shard=8", "shoal.FSDP(cpu_offload=True)", ("--fused",), OFFLOADED),
    (8, "shard=8", "shoal.FSDP()", ("--evaluate", "--micro-batches", "4"), EVALUATED),
]
REST = [
    (8, "shard=8", "shoal.FSDP()", ("--fused",), {}),
    (1024, "replicate=16,shard=64", "shoal.FSDP()", ("--fused",), {}),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, ("--fused", "--precision", "bf16"), {}),
    (1024, "shard=128,context=8", f"[{CONTEXT}, shoal.FSDP()]", ("--fused", *SEQUENCES), {}),
    (8, "shard=8", "shoal.FSDP()", ("--precision", "bf16"), ONE_READ),
    (8, "shard=8", "shoal.FSDP()", ("--fused", "--precision", "bf16"), {}),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, ("--fused", "--micro-batches", "4"), {}),
    (8, "replicate=2,pipeline=4", PIPELINE, ("--fused", *EIGHT, "--rank", "1"), {}),
    (1024, "replicate=256,pipeline=4", PIPELINE, EIGHT, ONE_READ),
    (1, "replicate=1", "shoal.SingleProcess()", (), ONE_READ),
    (8, "shard=8", "shoal.FSDP()", (), ONE_READ),
    (8, "tensor=8", "shoal.TensorParallel()", ("--fused",), {}),
    (1024, "shard=1024", "shoal.FSDP(param_dtype='bf16')", ("--fused",), {}),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, ("--fused",), {}),
    (8, "context=8", f"[{CONTEXT}, shoal.FSDP()]", ("--fused", *SEQUENCES), {}),
    (8, "replicate=2,pipeline=4", PIPELINE, ("--fused", *EIGHT, "--rank", "3"), {}),
    (1024, "shard=256,pipeline=4", PIPELINE, ("--fused", *EIGHT, "--rank", "1"), {}),
    (1024, "replicate=16,shard=64", "shoal.FSDP()", (), ONE_READ),
    (1024, "shard=1024", "shoal.FSDP(param_dtype='bf16')", (), ONE_READ),
    (8, "tensor=8", "shoal.TensorParallel()", (), ONE_READ),
    (8, "shard=8", "shoal.FSDP(cpu_offload=True)", (), OFFLOADED),
    (8, "shard=8", "shoal.FSDP(cpu_offload=True)", ("--precision", "bf16"), OFFLOADED),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, ("--precision", "bf16"), ONE_READ),
    (8, "shard=2,tensor=4", TENSOR_FSDP, ("--micro-batches", "4"), ONE_READ),
    (1024, "shard=128,context=8", f"[{CONTEXT}, shoal.FSDP()]", SEQUENCES, ONE_READ),
    (8, "context=8", f"[{CONTEXT}, shoal.FSDP()]", SEQUENCES, ONE_READ),
    (8, "replicate=2,pipeline=4", PIPELINE, (*EIGHT, "--rank", "3"), ONE_READ),
    (8, "replicate=2,pipeline=4", PIPELINE, (*EIGHT, "--evaluate"), EVALUATED),
    (1024, "shard=256,pipeline=4", PIPELINE, (*EIGHT, "--rank", "1"), ONE_READ),
]


def simulated(*options: str) -> dict[str, dict[str, int]]:
    """What a rank found in its third step; raises where an operation mixes devices."""
    command = [sys.executable, "-m", "helpers.simulated_device", *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "options", "blocking"),
    [
        *(pytest.param(*case, marks=pytest.mark.full(rows="all")) for case in FEW),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE),
        *(pytest.param(*case, marks=pytest.mark.long) for case in REST),
    ],
)
def test_a_step_on_a_simulated_device(
    size: int,
    layout: str,
    strategy: str,
    options: tuple[str, ...],
    blocking: dict[str, int],
) -> None:
    found = simulated(str(size), layout, strategy, *options)
    assert list(found["devices"]) == ["cpu" if "cpu_offload" in strategy else "sim"]
    assert found["blocking"] == blocking
    assert not found["repeated"]  # groups with the same ranks, and communicators of their own


def memory(strategy: str) -> dict[str, int]:
    """The largest numbers of bytes of each kind in a step in bf16 on 8 ranks."""
    return simulated("8", "shard=8", strategy, "--precision=bf16", "--memory", "--micro-batches=1")[
        "memory"
    ]


@pytest.mark.long
def test_memory_by_kind() -> None:
    """A rank keeps shards; what it gathers is of 16 bits and of two units at most."""
    wide, half = memory("shoal.FSDP(param_dtype='fp32')"), memory("shoal.FSDP()")
    unit, head = 64 + 64 + 64 * 256 + 256 + 256 * 64 + 64, 64 * 10 + 10
    whole = 4 * (4 * unit + head)
    for found in (wide, half):
        assert whole / 8 <= found["Sharded Param"] < 1.01 * whole / 8  # padded to equal shards
        assert found["OptState"] == 2 * found["Sharded Param"]
    assert wide["Unsharded Param"] == 2 * half["Unsharded Param"] < 4 * 2 * (unit + head + 8 * 64)
    assert wide["All Gather"] == 2 * half["All Gather"]
    assert half["Total"] < 0.85 * wide["Total"]


@pytest.mark.full
def test_lists_on_several_devices_are_caught() -> None:
    """Fake tensors alone let them pass; on a GPU each of them is an error."""
    script = (
        "import torch\n"
        "from helpers.simulated_device import Simulation, setup\n"
        "setup()\n"
        "with Simulation():\n"
        "    here, there = torch.zeros(2), torch.zeros(2, device='sim')\n"
        "    torch._foreach_mul_([there], 2.0)\n"
        "    torch._foreach_add_([here], [there])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: aten._foreach_add_.List of tensors on ['cpu', 'sim']" in done.stderr
