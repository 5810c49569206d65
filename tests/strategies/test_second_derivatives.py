"""Gradient penalties, which differentiate a gradient: exact through what couples ranks, or raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes
SAMPLES, BATCH = 18, 9  # not divisible by 2 or 4


class Centered(shoal.Coupled):
    """Subtract the mean of the batch and divide by its standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        groups = self.groups(x)
        count = groups.sum(x.new_ones(len(x), 1))
        x = x - groups.expand(groups.sum(x) / count)
        return x / groups.expand((groups.sum(x.square()) / count + 1e-3).sqrt())


class Gathered(nn.Module):
    """Subtract the mean over the rows of all ranks, as a loss over all pairs does."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            return x - (shoal.gather(x).all.sin()).mean(0)
        return x - x.sin().mean(0)


COUPLED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm without parameters": lambda: nn.BatchNorm1d(8, affine=False),
    "coupled": Centered,
    "gather": Gathered,
}


class Square(torch.autograd.Function):
    """A square whose derivative can't be differentiated."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        twice: Tensor = 2 * x * gradients[0]
        return twice


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Square.apply(x)
        return found


LAYERS = {**COUPLED, "differentiable once": Squared, "none": nn.Identity}


class Critic(nn.Module):
    """Returns its output and the gradient with respect to its input."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(5, 8), LAYERS[layer](), nn.Tanh(), nn.Linear(8, 1)
        ).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = self.layers(x)
        return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    y, slope = output
    return (y[:, 0] - 1).square().sum() + 10 * (slope.norm(dim=1) - 1).square().sum(), len(y)


def samples() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)


def train(world: shoal.World, layer: str) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    tensor = shoal.TensorParallel(plan={"layers.0": "column", "layers.3": "row"})
    strategy = tensor if "tensor" in str(world.layout) else None
    model = shoal.parallelize(Critic(layer), world, strategy)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), shoal.Task(loss))
    loader = shoal.Loader((samples(),), world, batch_size=BATCH)
    return [(found.loss, found.norm) for batch in loader.epochs(1) for found in [step(batch)]]


def by_torch(layer: str) -> list[tuple[float, float]]:
    model = Critic(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    order = shoal.Permutation(SAMPLES, seed=0, epoch=0).indices(0, SAMPLES)
    for x in samples()[torch.as_tensor(order)].split(BATCH):
        total, count = loss(model(x), None)
        (total / count).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        found.append(((total / count).item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        *((2, "replicate=2"), (3, "shard=3")),
        *(pytest.param(n, "replicate=-1", marks=pytest.mark.full) for n in (1, 3, 4)),
        *(pytest.param(n, "shard=-1", marks=pytest.mark.full) for n in (1, 2, 4)),
        pytest.param(4, "replicate=2,shard=2", marks=pytest.mark.full),
    ],
)
def test_a_penalty_through_layers_that_couple_ranks_is_that_of_one_process(
    size: int, layout: str
) -> None:
    with Ranks(size, layout=layout, seed=0) as ranks:
        for layer in COUPLED:
            for found in ranks.call(train, layer):
                assert found == [pytest.approx(each, rel=1e-9) for each in by_torch(layer)], layer


@pytest.mark.full
def test_a_penalty_through_tensor_parallel_layers_is_that_of_one_process() -> None:
    with Ranks(4, layout="replicate=2,tensor=2", seed=0) as ranks:
        for found in ranks.call(train, "none"):
            assert found == [pytest.approx(each, rel=1e-9) for each in by_torch("none")]


def mean_loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    total, count = loss(output, batch)
    return total / count, count


def penalty_in_loss(layers: nn.Module, x: Tensor, reduction: str) -> Tensor:
    """A penalty that the loss function computes, as those of GANs are written."""
    x = x.detach().requires_grad_()
    y = layers(x)
    slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    found: Tensor = getattr((slope.norm(dim=1) - 1).square() + y[:, 0], reduction)()
    return found


def refused(world: shoal.World) -> list[str]:
    """Errors of steps with penalties that are means, in the model and in the loss function."""
    model = shoal.parallelize(Critic("none"), world)
    found = []

    def first_batch() -> shoal.Batch:
        return next(iter(shoal.Loader((samples(),), world, batch_size=BATCH).epochs(1)))

    for task in (
        shoal.Task(mean_loss),
        shoal.Task(lambda _, batch: (penalty_in_loss(model.layers, batch[0], "mean"), len(batch[0]))),
    ):
        step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)
        with pytest.raises(shoal.StepError) as error:
            step(first_batch())
        found.append(error.value.found)
    task = shoal.Task(lambda _, batch: (penalty_in_loss(model.layers, batch[0], "sum"), len(batch[0])))
    shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), task)(first_batch())
    return found


def test_a_penalty_that_is_a_mean_is_refused() -> None:
    for size, layout in ((1, "replicate=1"), (2, "replicate=2")):
        with Ranks(size, layout=layout, seed=0) as ranks:
            for found in ranks.call(refused):
                assert ["it is a mean" in each for each in found] == [True, True]


def raised(world: shoal.World) -> str:
    """The error of a step on one of two models, as a GAN has them."""
    other = shoal.parallelize(nn.Linear(2, 2), world)
    with pytest.raises(RuntimeError) as error:
        train(world, "differentiable once")
    del other
    return str(error.value)


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, "replicate=1"), (2, "replicate=2"), pytest.param(2, "shard=2", marks=pytest.mark.full)],
)
def test_a_function_that_is_differentiable_once_raises_next_to_another_model(
    size: int, layout: str
) -> None:
    with Ranks(size, layout=layout, seed=0) as ranks:
        for found in ranks.call(raised):
            assert "differentiate twice" in found
