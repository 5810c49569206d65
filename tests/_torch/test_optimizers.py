from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal._torch import optimizers

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_skipping(kind: str, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.5, fused=True)
    if kind == "Adagrad" and not hasattr(optimizer, "_step_supports_amp_scaling"):  # torch 2.11
        assert not optimizers.skips_on_device(optimizer)
        return
    assert optimizers.skips_on_device(optimizer)
    moved = []
    for skip in (0.0, 1.0, 0.0):
        before = [parameter.clone(), *(each.clone() for each in optimizer.state[parameter].values())]
        parameter.grad = torch.full_like(parameter, torch.nan if skip else 1.0)
        with optimizers.skipping(optimizer, torch.tensor(skip)):
            optimizer.step()
        after = [parameter, *optimizer.state[parameter].values()]
        moved.append(not all(map(torch.equal, before, after)))
    assert moved == [True, False, True]
    assert not hasattr(optimizer, "found_inf")
    assert not optimizers.skips_on_device(getattr(torch.optim, kind)([parameter], lr=0.5))
    assert not optimizers.skips_on_device(torch.optim.RMSprop([parameter]))
