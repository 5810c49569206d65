"""Steps on a simulated accelerator: no operation mixes devices, and few block the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TENSOR_FSDP = "[shoal.TensorParallel(), shoal.FSDP()]"
ONE_READ = {"item in shoal/strategies/correction.py:read": 3}
"""Loss, count and norm, in one transfer before the optimizer step."""
OFFLOADED = {
    "copy sim to cpu in shoal/strategies/comm_timing.py:marked": 26,  # of gradients, by FSDP2
    "copy cpu to sim in shoal/strategies/mesh_reducer.py:world_totals": 1,  # of their norm
    **ONE_READ,
}
EVALUATED = {
    "item in shoal/training/evaluation.py:means": 4,  # loss and accuracy, in one transfer
    "item in shoal/training/evaluation.py:evaluate": 1,
}
FEW = [
    (1, "replicate=1", "shoal.SingleProcess()", (), ONE_READ),
    (1, "replicate=1", "shoal.SingleProcess()", ("--fused",), {}),
    (8, "shard=8", "shoal.FSDP()", ("--fused",), {}),
    (8, "shard=8", "shoal.FSDP()", (), ONE_READ),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, (), ONE_READ),
]
MORE = [
    (1024, "replicate=16,shard=64", "shoal.FSDP()", ("--fused",), {}),
    (8, "shard=8", "shoal.FSDP()", ("--fused", "--precision", "bf16"), {}),
    (8, "tensor=8", "shoal.TensorParallel()", ("--fused",), {}),
    (1024, "shard=256,tensor=4", TENSOR_FSDP, ("--fused", "--micro-batches", "4"), {}),
    (8, "shard=8", "shoal.FSDP(cpu_offload=True)", ("--fused",), OFFLOADED),
    (8, "shard=8", "shoal.FSDP()", ("--evaluate", "--micro-batches", "4"), EVALUATED),
    (1024, "replicate=16,shard=64", "shoal.FSDP()", (), ONE_READ),
    (1024, "shard=1024", "shoal.FSDP(param_dtype='bf16')", (), ONE_READ),
    (8, "shard=8", "shoal.FSDP()", ("--precision", "bf16"), ONE_READ),
    (8, "tensor=8", "shoal.TensorParallel()", (), ONE_READ),
    (8, "shard=8", "shoal.FSDP(cpu_offload=True)", (), OFFLOADED),
    (8, "shard=2,tensor=4", TENSOR_FSDP, ("--micro-batches", "4"), ONE_READ),
]


@pytest.mark.parametrize(
    ("size", "layout", "strategy", "options", "blocking"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_a_step_on_a_simulated_device(
    size: int,
    layout: str,
    strategy: str,
    options: tuple[str, ...],
    blocking: dict[str, int],
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "helpers.simulated_device", str(size), layout, strategy, *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == ["cpu" if "cpu_offload" in strategy else "sim"]
    assert found["blocking"] == blocking
