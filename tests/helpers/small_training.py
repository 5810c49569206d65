"""What small trainings of tests share: losses, a model with all that trains it, a loop, the events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.telemetry.events import path_of, read_events

Loss = Callable[[Tensor, Any], tuple[Tensor, Any]]


def cross_entropy(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def mean_cross_entropy(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """A mistake."""
    return F.cross_entropy(output, batch[1]), len(batch[1])


def squared_error(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.mse_loss(output, batch[1], reduction="sum"), len(batch[1])


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def step_of(
    world: shoal.World,
    model: nn.Module,
    loss: Loss = squares,
    strategy: Any = None,
    *,
    lr: float = 0.1,
    **options: Any,
) -> shoal.Step:
    """A Step with SGD over a model that it parallelizes."""
    model = shoal.parallelize(model, world, strategy)
    return shoal.Step(model, sgd(model, lr), shoal.Task(loss), **options)


def backward(batch: shoal.Batch, model: Any, loss: Loss) -> None:
    for micro in batch:
        total, count = loss(model(micro[0]), micro)
        batch.backward(total=total, count=count, model=model)


def take(
    batch: shoal.Batch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    clip: float | None = None,
) -> shoal.StepResult:
    """A step of a custom loop."""
    backward(batch, model, loss)
    result = batch.finish(model, clip=clip)
    optimizer.step()
    optimizer.zero_grad()
    return result


def events_of(directory: Path, kind: str | None = None, rank: int = 0) -> list[dict[str, Any]]:
    """The events of a run directory as they were written, or those of one kind."""
    found = read_events(path_of(directory, rank))
    return [event for event in found if kind in (None, event["event"])]


def saved(directory: Path, folder: str = "checkpoints") -> list[int]:
    """The steps of the checkpoints in a run directory, where nothing else may be."""
    names = [path.name for path in (directory / folder).iterdir()]
    return sorted(int(name.removeprefix("step-")) for name in names)
