"""State by name, and what a step refuses to drive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.util.errors import StepError

SAMPLES = 6


def batch() -> Batch:
    data = torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % 3
    return Batch(0, SAMPLES, [MicroBatch(data, 0, SAMPLES, 1.0)], seed=0)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1


class WithExtra(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[int] = []

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layer(values)
        return output

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_state_that_is_of_no_parameter_and_of_no_tensor_goes_on(world: shoal.World) -> None:
    def make() -> tuple[WithExtra, Counting, shoal.Step]:
        model = shoal.parallelize(WithExtra(), world)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, shoal.Step(model, optimizer, shoal.Task(loss))

    model, _, step = make()
    step(batch())
    model.seen = [1, 2]
    state = copy.deepcopy(step.state_dict())
    model, optimizer, step = make()
    step.load_state_dict(state)
    assert model.seen == [1, 2]
    own: dict[Any, Any] = optimizer.state
    assert own["steps"] == 1
    assert "momentum_buffer" in optimizer.state[model.layer.weight]


def test_a_group_that_was_added_is_part_of_the_state(world: shoal.World) -> None:
    model = shoal.parallelize(network(), world)
    optimizer = torch.optim.AdamW(model[0].parameters())
    step = shoal.Step(model, optimizer, shoal.Task(loss))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    step(batch())
    state = copy.deepcopy(step.state_dict())
    assert state["optimizer"]["members"] == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}
    step.load_state_dict(state)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "closure"),
        (lambda model: torch.optim.AdamW, "not a torch.optim.Optimizer"),
    ],
)
def test_optimizers_that_no_step_can_drive(
    world: shoal.World, optimizer: Callable[[nn.Module], Any], found: str
) -> None:
    model = shoal.parallelize(network(), world)
    with pytest.raises(StepError, match=found):
        shoal.Step(model, optimizer(model), shoal.Task(loss))


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        (torch.optim.lr_scheduler.ReduceLROnPlateau, "with a metric"),
        (lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(sgd(network()), 0.5), "another SGD"),
        (lambda optimizer: 0.1, "not a torch"),
    ],
)
def test_schedules_that_no_step_can_drive(
    world: shoal.World, schedule: Callable[[torch.optim.Optimizer], Any], found: str
) -> None:
    model = shoal.parallelize(network(), world)
    optimizer = sgd(model)
    with pytest.raises(StepError, match=found):
        shoal.Step(model, optimizer, shoal.Task(loss), schedule=schedule(optimizer))
