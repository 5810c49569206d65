from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal
from shoal.util.errors import CheckpointError, StepError


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def moved(net: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def test_the_average_is_that_of_torch() -> None:
    net = model()
    ema = shoal.EMA(net, decay=0.9)
    torchs = AveragedModel(copy.deepcopy(net), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torchs.update_parameters(net)  # the first one copies
    for number in range(5):
        moved(net, number)
        ema.update()
        torchs.update_parameters(net)
    own = copy.deepcopy(net.state_dict())
    with ema.applied():
        for ours, theirs in zip(net.parameters(), torchs.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)
    for name, value in net.state_dict().items():
        assert torch.equal(value, own[name])


def test_the_same_tensors_have_their_own_values_again_after_an_error() -> None:
    net = model()
    ema = shoal.EMA(net, decay=0.5)
    moved(net, 0)
    own = copy.deepcopy(net.state_dict())
    tensors = [id(p) for p in net.parameters()]
    with ema.applied():
        assert [id(p) for p in net.parameters()] == tensors
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in net.state_dict().items())


def test_its_state_goes_on_and_not_into_another_model() -> None:
    net = model()
    ema = shoal.EMA(net, decay=0.5)
    moved(net, 0)
    ema.update()
    again = shoal.EMA(model(), decay=0.5)
    again.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert again.updates == 1
    for name, value in again.state_dict()["averages"].items():
        assert torch.equal(value, ema.state_dict()["averages"][name])
    with pytest.raises(CheckpointError, match=r"differs in 0.bias"):
        shoal.EMA(nn.Linear(3, 4)).load_state_dict(ema.state_dict())


def test_decays_that_can_not_be() -> None:
    for decay in (-0.1, 1.0, 2.0):
        with pytest.raises(StepError, match="below 1"):
            shoal.EMA(model(), decay=decay)
