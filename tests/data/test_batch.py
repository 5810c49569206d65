from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.data.noise import Noise
from shoal.util.errors import StepError


def batch(world: shoal.World | None = None) -> Batch:
    micros = [MicroBatch("a", 40, 2, 1.0), MicroBatch("b", 42, 1, 1.0), MicroBatch("c", 36, 1, 0.0)]
    return Batch(36, 8, micros, seed=1, world=world)


def test_a_batch_knows_where_its_loop_stands() -> None:
    found = batch()
    seen = []
    for value in found:
        seen.append((value, found.micro.first, found.noise.normal().tolist()))
    expected = [("a", 40, 2), ("b", 42, 1), ("c", 36, 1)]
    assert seen == [(v, first, Noise(1, first, n).normal().tolist()) for v, first, n in expected]
    assert len(found) == 3
    with pytest.raises(StepError, match="there is no current micro-batch"):
        found.micro  # noqa: B018


def test_the_share_of_a_batch_leaves_out_stand_ins() -> None:
    assert batch().share == (40, 43)
    assert Batch(36, 8, [MicroBatch("c", 36, 1, 0.0)], seed=1).share == (36, 36)


def test_a_loop_of_ones_own_is_as_exact_as_its_mean(world: shoal.World) -> None:
    torch.manual_seed(0)
    model = shoal.parallelize(nn.Linear(3, 1).double(), world)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    counts = [1, 3]  # as from masks: not the number of samples
    micros = [MicroBatch(inputs[:2], 0, 2, 1.0), MicroBatch(inputs[2:], 2, 3, 1.0)]
    found = Batch(0, 5, micros, seed=0, world=world)
    for values, count in zip(found, counts, strict=True):
        found.backward(total=model(values).square().sum(), count=torch.tensor(count))
    finished = found.finish(model, clip=0.25)
    mean = model(inputs).square().sum() / 4
    expected = torch.autograd.grad(mean, list(model.parameters()))
    norm = np.sqrt(sum(float(g.square().sum()) for g in expected))
    assert finished.loss == pytest.approx(mean.item(), rel=1e-12)
    assert finished.norm == pytest.approx(norm, rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 0.25 / (norm + 1e-6), rtol=1e-12, atol=0)


def test_a_loop_of_ones_own_asks_which_of_two_models_learns(world: shoal.World) -> None:
    found = Batch(0, 1, [MicroBatch(torch.ones(1, 1), 0, 1, 1.0)], seed=0, world=world)
    with pytest.raises(StepError, match="no parallelized model"):
        found.backward(total=torch.ones(()), count=1)
    first, second = (shoal.parallelize(nn.Linear(1, 1), world) for _ in range(2))
    for values in found:
        with pytest.raises(StepError, match="2 parallelized models"):
            found.backward(total=second(first(values)).sum(), count=1)
        found.backward(total=second(first(values)).sum(), count=1, model=second)
    assert all(p.grad is None for p in first.parameters())
    assert all(p.grad is not None for p in second.parameters())


def test_a_loop_of_ones_own_notices_what_is_not_a_number(world: shoal.World) -> None:
    model = shoal.parallelize(nn.Linear(1, 1), world)
    found = Batch(64, 1, [MicroBatch(torch.ones(1, 1), 64, 1, 1.0)], seed=0, world=world)
    for values in found:
        found.backward(total=model(values).sum() * math.inf, count=1)
    with pytest.raises(StepError, match="samples 64 to 64"):
        found.finish(model)


def test_noise_of_a_micro_batch_goes_on_from_draw_to_draw() -> None:
    found = Batch(0, 4, [MicroBatch(None, 0, 2, 1.0), MicroBatch(None, 2, 2, 1.0)], seed=5)
    drawn = [torch.cat((found.noise.normal(2), found.noise.normal(2)), 1) for _ in found]
    assert torch.equal(torch.cat(drawn), Noise(5, 0, 4).normal(4))
