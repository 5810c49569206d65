from __future__ import annotations

import pytest
import torch

from shoal._torch import foreach

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("fused", [True, False])
def test_foreach(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        for name in ("add_", "copy_", "lerp_", "mul_", "neg_", "norm", "sub_"):
            monkeypatch.delattr(torch, f"_foreach_{name}")
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    foreach.mul_(tensors, 2)
    foreach.add_(tensors, [torch.ones(2), torch.ones(1)], alpha=2)
    foreach.sub_(tensors, [torch.ones(2), torch.ones(1)])
    foreach.neg_(tensors)
    assert [each.tolist() for each in tensors] == [[-7, -9], [-3]]
    foreach.lerp_(tensors, [torch.zeros(2), torch.zeros(1)], 0.5)
    foreach.copy_(tensors[1:], [torch.full((1,), 2.0)])
    assert [each.tolist() for each in tensors] == [[-3.5, -4.5], [2]]
    mixed = [torch.tensor([3.0]), torch.tensor([3.0], dtype=torch.float64), torch.tensor(3.0)]
    on_device = [tensor.clone() for tensor in mixed]
    foreach.mul_(mixed, 1 / 3)
    foreach.mul_(on_device, torch.tensor(1 / 3, dtype=torch.float64))
    assert all(map(torch.equal, mixed, on_device))
    assert on_device[1].dtype == torch.float64
    lengths = foreach.norm([torch.tensor([3.0, 4.0], dtype=torch.float16)], torch.float32)
    assert (lengths[0].item(), lengths[0].dtype) == (5, torch.float32)
