"""The private names of FSDP2 by which its mixed precision changes between steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal._torch import fsdp

pytestmark = pytest.mark.compat


@pytest.fixture
def sharded() -> Iterator[FSDPModule]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model, FSDPModule)
    yield model
    dist.destroy_process_group()


def test_a_policy_holds_from_the_next_forward(sharded: FSDPModule) -> None:
    assert fsdp.parameter_dtypes(sharded) == {torch.float32}
    assert isinstance(sharded, nn.Module)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for policy in (half, MixedPrecisionPolicy(), half):
        fsdp.use_policy(sharded, policy)
        output = sharded(torch.ones(1, 2))
        assert output.dtype == (policy.param_dtype or torch.float32)
        output.sum().backward()
        assert {p.grad.dtype for p in sharded.parameters() if p.grad is not None} == {torch.float32}
