"""Your own loop: a loss that is named wrongly, and gradients that are cleared too early or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shoal
from shoal.util.errors import StepError

SAMPLES, BATCH = 24, 8
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


class Parts:
    """A model of three classes and what trains it."""

    def __init__(self, world: shoal.World) -> None:
        torch.manual_seed(0)
        self.model = shoal.parallelize(torch.nn.Linear(6, 3), world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = shoal.Loader((X, Y), world, batch_size=BATCH, micro_batches=2)

    def take(self, batch: shoal.Batch) -> None:
        backward(self, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "loss", "count", "found"),
    [
        ("total", F.cross_entropy, 4, "it is a mean, not a sum"),
        ("total", lambda output, y: output.pow(2).mean(), torch.tensor(4), "it is a mean, not a sum"),
        (
            "mean",
            lambda output, y: F.cross_entropy(output, y, reduction="sum"),
            4,
            "it is a sum, not a mean",
        ),
    ],
)
def test_a_loss_whose_last_operation_is_the_other_reduction_raises(
    world: shoal.World, name: str, loss: Callable[..., Tensor], count: Any, found: str
) -> None:
    parts = Parts(world)
    batch: Any = next(parts.data.epochs(1))
    x, y = next(iter(batch))
    with pytest.raises(StepError, match=found) as caught:
        batch.backward(**{name: loss(parts.model(x), y)}, count=count, model=parts.model)
    assert f"{'mean' if name == 'total' else 'total'}=loss" in caught.value.fix
    assert all(p.grad is None for p in parts.model.parameters())


@pytest.mark.parametrize(
    ("name", "loss", "count"),
    [
        ("total", F.cross_entropy, 1),  # the unit of the mean is the micro-batch
        ("total", lambda output, y: F.cross_entropy(output, y) * len(y), 4),
        ("total", lambda output, y: output[0, 0].mean(), 4),  # a mean over one element
        ("mean", lambda output, y: (output.pow(2) / output.numel()).sum(), 4),
        ("mean", lambda output, y: F.cross_entropy(output, y, reduction="sum") / len(y), 4),
    ],
)
def test_a_loss_that_may_be_what_it_is_named_is_accepted(
    world: shoal.World, name: str, loss: Callable[..., Tensor], count: int
) -> None:
    parts = Parts(world)
    batch: Any = next(parts.data.epochs(1))
    for x, y in batch:
        batch.backward(**{name: loss(parts.model(x), y)}, count=count, model=parts.model)
    batch.finish(parts.model)


@pytest.mark.parametrize(("stepped", "clipped"), [(True, False), (False, False), (True, True)])
def test_gradients_that_were_not_cleared_raise_at_the_next_batch(
    world: shoal.World, stepped: bool, clipped: bool
) -> None:
    parts = Parts(world)
    first, second, third = parts.data.epochs(1)
    backward(parts, first)
    if clipped:
        torch.nn.utils.clip_grad_value_(parts.model.parameters(), 0.1)
    if stepped:
        parts.optimizer.step()
    with pytest.raises(StepError, match="would be added to those of this one: weight, bias") as caught:
        parts.take(second)
    assert "optimizer.step(), optimizer.zero_grad()" in caught.value.fix
    parts.take(third)


def test_gradients_of_parameters_that_no_optimizer_has_add_up_as_in_plain_torch(
    world: shoal.World,
) -> None:
    parts = Parts(world)
    weight, bias = parts.model.parameters()
    parts.optimizer = torch.optim.SGD([weight], lr=0.1)
    first, second, _ = parts.data.epochs(1)
    parts.take(first)
    assert bias.grad is not None
    before = bias.grad.clone()
    parts.take(second)
    assert weight.grad is None
    assert not torch.equal(bias.grad, before)


def test_gradients_cleared_before_the_optimizer_steps_raise_at_the_next_batch(
    world: shoal.World,
) -> None:
    parts = Parts(world)
    first, second, third = parts.data.epochs(1)
    backward(parts, first)
    parts.optimizer.zero_grad()
    parts.optimizer.step()
    with pytest.raises(StepError, match=r"cleared between batch\.finish and optimizer\.step"):
        parts.take(second)
    parts.take(third)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_finished_batch_may_be_skipped(world: shoal.World, to_none: bool) -> None:
    parts = Parts(world)
    first, second, third = parts.data.epochs(1)
    backward(parts, first)
    parts.optimizer.zero_grad(set_to_none=to_none)
    parts.take(second)
    backward(parts, third)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=to_none)
    parts.optimizer.step()  # a second step without gradients takes nothing from the first
    parts.take(next(parts.data.epochs(2)))


def backward(parts: Parts, batch: shoal.Batch) -> None:
    for x, y in batch:
        loss = F.cross_entropy(parts.model(x), y)
        batch.backward(mean=loss, count=len(y), model=parts.model)
    batch.finish(parts.model)
