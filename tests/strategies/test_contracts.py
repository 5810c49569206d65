"""The contracts carry an engine that owns the schedule: a pipeline of two stages, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.ranks import RankError, Ranks
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.strategies.contracts import Engine
from shoal.strategies.correction import Factor, Totals
from shoal.strategies.task import Task
from shoal.util.errors import StepError

LAYOUT = "pipeline=2"
pytestmark = pytest.mark.processes

SAMPLES, WIDTH, CLASSES, STEPS = 21, 5, 3, 6


class Stages:
    """Rank 0 keeps the model's `first`, rank 1 its `second`; micro-batches go one after the other."""

    axes: ClassVar[tuple[str, ...]] = ("pipeline",)
    defers: ClassVar[bool] = False

    def apply(self, model: nn.Module, world: shoal.World) -> Engine:
        delattr(model, "second" if world.rank == 0 else "first")
        return StageEngine(model.to(world.device), world)


class StageEngine(Engine):
    def __init__(self, module: nn.Module, world: shoal.World) -> None:
        self.module = module
        self.world = world
        self.reports_loss = world.rank == 1
        self.followed: list[str] = []

    def gradients(
        self, task: Task, batch: Batch, *, autocast: torch.dtype | None, scale: float
    ) -> Totals:
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in batch.micros:
            hidden, output = self._forward(task, micro, batch.seed)
            if self.reports_loss:
                loss, count = task.reduce(output, micro, batch.seed)
                (loss * (micro.weight * scale / batch.size)).backward()
                assert hidden.grad is not None
                dist.send(hidden.grad, 0)
                sums += torch.tensor([float(loss), count]) * micro.weight
            else:
                gradient = torch.empty_like(output)
                dist.recv(gradient, 1)
                output.backward(gradient)
        square = sum(p.grad.square().sum() for p in self.module.parameters() if p.grad is not None)
        totals = self.world.all_reduce(torch.cat((sums, torch.as_tensor(square).reshape(1).double())))
        return Totals(float(totals[0]), float(totals[1]), float(totals[2].sqrt()))

    def _forward(self, task: Task, micro: MicroBatch, seed: int) -> tuple[Tensor, Any]:
        if not self.reports_loss:
            hidden = self.module(*task.arguments(micro, seed)[0])
            dist.send(hidden.detach(), 1)
            return hidden, hidden
        hidden = torch.empty(micro.samples, WIDTH, dtype=torch.float64)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        return hidden, self.module(hidden)

    def update(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        self.followed.append("update")
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor
        optimizer.step()
        self.module.zero_grad()

    def discard(self) -> None:
        self.followed.append("discard")
        self.module.zero_grad()

    def infer(self, task: Task, micro: MicroBatch, seed: int, *, autocast: torch.dtype | None) -> Any:
        _, output = self._forward(task, micro, seed)
        return output if self.reports_loss else None

    def compile(self, how: str) -> None:
        raise NotImplementedError

    def synchronize(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.followed.append("synchronize")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        for stage in self.children():
            values = stage(values)
        return values


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def mean(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1]), len(batch[1])


def returned(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """A loss that refuses halves of an output, so that the model has to be run again."""
    if output._base is not None:
        raise RuntimeError("a view")
    return loss(output, batch)


def steps_of(world: shoal.World, strategy: Any, loss: Any = loss) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(Net().double(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=0.5)
    return step, shoal.Loader(dataset(), world, batch_size=8, micro_batches=3)


def train(world: shoal.World, strategy: Any = None) -> tuple[list[Any], dict[str, Any], Any]:
    step, data = steps_of(world, strategy)
    log = [step(batch)[:3] for _, batch in zip(range(STEPS), data.epochs(9), strict=False)]
    seen = shoal.evaluate(step, dataset(), metrics={"accuracy": shoal.Accuracy()}, batch_size=4)
    return log, seen, {name: p.detach() for name, p in step.model.named_parameters()}


def in_stages(world: shoal.World) -> tuple[list[Any], dict[str, Any], Any]:
    return train(world, Stages())


def test_a_pipeline_made_by_hand_is_one_process(ranks: Ranks) -> None:
    with shoal.init() as world:
        log, seen, parameters = train(world)
    (first, second) = ranks.call(in_stages)
    for ours, *_ in (first, second):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(log), rtol=1e-12, atol=0)
    for _, ours, _ in (first, second):
        assert ours["samples"] == seen["samples"] == SAMPLES
        assert ours["accuracy"] == seen["accuracy"]
        assert ours["loss"] == pytest.approx(seen["loss"], rel=1e-12)
    together = first[2] | second[2]
    assert together.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(together[name], value, rtol=1e-12, atol=1e-13)


def stepped(world: shoal.World, chosen: Any) -> list[str]:
    step, data = steps_of(world, Stages(), chosen)
    step(next(data.epochs(1)))
    step.state_dict()
    assert isinstance(step.engine, StageEngine)
    return step.engine.followed


def test_a_mean_is_refused_on_the_stage_without_a_loss_too(ranks: Ranks) -> None:
    for result in ranks.attempt(stepped, mean):
        assert isinstance(result, RankError)
        assert isinstance(result.error, StepError)
        assert "it is a mean, not a sum" in str(result.error)


def test_ranks_run_the_model_equally_often_in_the_trial(ranks: Ranks) -> None:
    # A rank that ran it once more would wait for the other's activations.
    assert ranks.call(stepped, returned) == [["update", "synchronize"]] * 2


def counts_nothing(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return output.sum(), 0


def discarded(world: shoal.World) -> list[str]:
    step, data = steps_of(world, Stages(), counts_nothing)
    with pytest.raises(StepError, match="count of 0"):
        step(next(data.epochs(1)))
    assert isinstance(step.engine, StageEngine)
    return step.engine.followed


def test_one_of_update_and_discard_follows_even_where_the_decision_fails(ranks: Ranks) -> None:
    assert ranks.call(discarded) == [["discard"]] * 2


def refused(world: shoal.World, state: Mapping[str, Any]) -> None:
    steps_of(world, Stages())[0].check_state(state)


def test_a_state_is_compared_with_the_model_of_all_ranks(ranks: Ranks) -> None:
    with shoal.init() as world:
        step, _ = steps_of(world, None)
        state = step.state_dict()
    ranks.call(refused, state)
    state["model"]["third.weight"] = torch.zeros(1)
    for result in ranks.attempt(refused, state):
        assert isinstance(result, RankError)
        assert "unexpected: third.weight" in str(result.error)
        assert "missing" not in str(result.error)
