"""Gradients that would not be reduced over all ranks, or not be the batch's, are refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import Ranks

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 40, 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(values).tanh())
        return output


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, 3, (SAMPLES,), generator=generator)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


class Switched(Plain):
    """Has a layer that can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(4, 3)
        self.on = True

    def forward(self, values: Tensor) -> Tensor:
        output = super().forward(values)
        return output + self.side(values) if self.on else output


def later(world: shoal.World, change: str, options: dict[str, Any]) -> tuple[str, list[Tensor]]:
    """The error of the second batch, before which the model has changed."""
    gc.collect()
    model = shoal.parallelize(build(Switched), world, shoal.DDP(**options))
    assert isinstance(model, Switched)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    batches = shoal.Loader(data(), world, batch_size=BATCH).epochs(1)
    step(next(batches))
    if change == "frozen":
        model.side.requires_grad_(False)
    else:
        model.on = False
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(shoal.StepError) as caught:
        step(next(batches))
    assert all(map(torch.equal, model.parameters(), before))
    return caught.value.found, before


@pytest.mark.parametrize("change", ["frozen", "off"])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": False}, {"static_graph": True}]
)
def test_a_parameter_that_is_no_longer_used_is_no_excuse_for_unreduced_gradients(
    ranks: Ranks, change: str, options: dict[str, Any]
) -> None:
    (found, before), *others = ranks.call(later, change, options)
    assert "the last micro-batch gave no gradient" in found
    for _, other in others:
        assert all(map(torch.equal, before, other))


def thawed(world: shoal.World, added: bool) -> None:
    model = build(Frozen)
    shoal.parallelize(model, world)
    assert isinstance(model, Frozen)
    if added:
        model.second = nn.Linear(16, 3).double()
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    batches = shoal.Loader(data(), world, batch_size=BATCH).epochs(1)
    if not added:
        step(next(batches))
        model.first.requires_grad_(True)
    name = "second.weight" if added else "first.weight"
    with pytest.raises(shoal.StepError, match=f"{name}(.|\\n)*before parallelize"):
        step(next(batches))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("added", [False, True], ids=["thawed", "added"])
def test_parameters_that_nobody_reduces_do_not_learn(
    ranks: Ranks, world: shoal.World, added: bool
) -> None:
    thawed(world, added)
    ranks.call(thawed, added)


def test_uninitialized_parameters_are_refused(world: shoal.World) -> None:
    with pytest.raises(shoal.StepError, match="lazy layers: weight, bias"):
        shoal.parallelize(nn.LazyLinear(3), world)


def skips(world: shoal.World, to_none: bool) -> tuple[str | None, list[float]]:
    gc.collect()
    model = shoal.parallelize(build(Plain), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted: list[float] = []
    for number, batch in enumerate(shoal.Loader(data(), world, batch_size=BATCH).epochs(1)):
        try:
            for micro in batch:
                total, count = loss(model(micro[0]), micro)
                batch.backward(total=total, count=count, model=model)
        except shoal.StepError as error:
            return error.found, counted
        if number != 1:
            counted.append(batch.finish(model).counted)
            optimizer.step()
        optimizer.zero_grad(set_to_none=to_none or number != 1)
    return None, counted


def test_a_batch_that_a_loop_of_ones_own_skips_leaves_nothing(ranks: Ranks, world: shoal.World) -> None:
    for error, counted in [*ranks.call(skips, True), skips(world, True)]:
        assert error is None
        assert counted == [BATCH] * (SAMPLES // BATCH - 1)
    for error, _ in [*ranks.call(skips, False), skips(world, False)]:
        assert error is not None
        assert "batch.finish was not called" in error


@pytest.mark.parametrize("count", [float("nan"), float("inf")])
def test_a_count_that_is_no_number_is_the_same_error_as_in_one_process(
    ranks: Ranks, count: float
) -> None:
    assert all(found is not None for found in ranks.call(counted_wrongly, count))


def counted_wrongly(world: shoal.World, count: float) -> str | None:
    gc.collect()
    model = shoal.parallelize(build(Plain), world)
    task = shoal.Task(lambda output, _: (output.sum(), count))
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), task)
    batch = next(shoal.Loader(data(), world, batch_size=BATCH).epochs(1))
    try:
        step(batch)
    except shoal.StepError as error:
        return error.found
    return None
