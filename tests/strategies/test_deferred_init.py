"""Construction in little memory: the values of one process, whatever the constructor does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.strategies import deferred_init
from shoal.strategies.deferred_init import Deferred, construct


class Net(nn.Module):
    """Inits that read what they draw, that depend on each other, and tensors that are no draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.conv = nn.Conv1d(16, 16, 3)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer(
            "table", torch.arange(10.0).view(2, 5) * 3 + torch.tensor([1.0, 2, 3, 4, 5])
        )
        self.register_buffer("listed", torch.from_numpy(np.arange(5.0)))
        self.scale = nn.Parameter(torch.full((16,), 0.5) + torch.randn(16) * 0.1)
        nn.init.trunc_normal_(self.conv.weight, std=0.02)
        self.apply(self._again)

    def _again(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0, 0.02)


class Converted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        nn.init.orthogonal_(self.conv.weight.view(16, -1))
        with torch.no_grad():
            self.head.weight.mul_(2)[0] = 7
            self.scale.mul_(float(self.head.weight.norm()))
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 5)]


def filled(made: Deferred) -> nn.Module:
    """With memory as `fully_shard` gives it, which keeps ties."""
    found: dict[int, Tensor] = {}
    for part in made.module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in found:
                    real = torch.empty_like(tensor, device="cpu")
                    found[id(tensor)] = nn.Parameter(real) if isinstance(tensor, nn.Parameter) else real
                if tensor is not None:
                    held[name] = found[id(tensor)]  # type: ignore[assignment]
    made.fill()
    return made.module


@pytest.mark.parametrize("large", [1, 2**20], ids=["all dropped", "none dropped"])
@pytest.mark.parametrize("make", [Net, Converted])
def test_values_and_draws_are_those_of_the_constructor(
    make: Callable[[], nn.Module], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_init, "LARGE", large)
    torch.manual_seed(3)
    expected, after = make().state_dict(), torch.rand(1)
    torch.manual_seed(3)
    made = construct(make, resident=0)
    assert torch.equal(torch.rand(1), after)
    found = filled(made).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_no_more_is_there_than_allowed() -> None:
    """Sixteen layers of 4 MiB, of which two may be there beside the one in use."""
    peak = 0

    class Watched(nn.Module):
        def __init__(self) -> None:
            nonlocal peak
            super().__init__()
            self.layers = nn.ModuleList()
            for _ in range(16):
                self.layers.append(nn.Linear(1024, 1024, bias=False))
                there = sum(p.untyped_storage().nbytes() for p in self.parameters())
                peak = max(peak, there)

    torch.manual_seed(0)
    made = construct(Watched, resident=8 * 2**20)
    assert peak <= 12 * 2**20
    torch.manual_seed(0)
    last = [nn.Linear(1024, 1024, bias=False) for _ in range(16)][-1]
    assert torch.equal(made.record.value(made.made["layers.15.weight"]), last.weight)
