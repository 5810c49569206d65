"""The look that a Step takes at the loss before its first batch: it must leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.world import random_state, set_random_state


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[0] + random.random() + np.random.rand() + torch.rand(1)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


def after_one_step(monkeypatch: pytest.MonkeyPatch, *, checked: bool) -> dict[str, Any]:
    """The random state after the first step of a Step, with and without its look at the loss."""
    with shoal.init() as world:
        model = shoal.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Dropout()), world)
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss, inputs))
        if not checked:
            monkeypatch.setattr(step, "_prepare", lambda batch: None)
        data = shoal.Loader((torch.ones(4, 3), torch.zeros(4, 3)), world, batch_size=4)
        step(next(data.epochs(1)))
        return random_state()


def test_random_states_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = random_state()
    seen, unseen = (after_one_step(monkeypatch, checked=checked) for checked in (True, False))
    set_random_state(kept)
    assert seen["python"] == unseen["python"]
    assert np.array_equal(seen["numpy"][1], unseen["numpy"][1])
    assert seen["numpy"][2:] == unseen["numpy"][2:]
    assert torch.equal(seen["torch"], unseen["torch"])


def test_frozen_layers_stay_in_their_mode() -> None:
    kept = random_state()
    with shoal.init() as world:
        model = shoal.parallelize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), world)
        model[1].eval()
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
        data = shoal.Loader((torch.ones(4, 3), torch.zeros(4, 3)), world, batch_size=4)
        step(next(data.epochs(1)))
        assert [module.training for module in model] == [True, False]
    set_random_state(kept)
