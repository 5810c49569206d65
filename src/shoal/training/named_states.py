"""The Steps and models of a Run, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.data import Loader
from shoal.strategies import engine_of
from shoal.strategies.other_tools import OtherToolEngine, reading_engine
from shoal.training.other_tools import OtherToolState
from shoal.training.step import Step
from shoal.training.train_state import TrainState
from shoal.util.errors import StepError

Given = TypeVar("Given")
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
Schedules: TypeAlias = LRScheduler | Sequence[LRScheduler]
_ALONE = "step"
"""The name of the only Step or model of a Run."""


def train_states(
    model: Step | nn.Module | Mapping[str, Step | nn.Module],
    optimizer: Optimizers | Mapping[str, Optimizers] | None = None,
    schedule: Schedules | Mapping[str, Schedules] | None = None,
    loader: object = None,
) -> dict[str, TrainState]:
    """Return the Steps and models of a Run by name, each model with its optimizer and schedule.

    A single one has the name "step". Another tool trains a model that was not parallelized, with the
    batches of `loader`. Raises StepError for an object that a Run can't save and count.
    """
    models: dict[str, Step | nn.Module] = _by_name(model)
    optimizers: dict[str, Optimizers] = _by_name(optimizer)
    schedules: dict[str, Schedules] = _by_name(schedule)
    given = f"shoal.Run(directory, {type(model).__name__}, loader, …)"
    if not models:
        raise _not_trainable(given, "neither a Step nor a model")
    alone = {name for name, each in models.items() if not isinstance(each, Step)}
    for what, names in (("optimizer", optimizers.keys()), ("schedule", schedules.keys())):
        if not names <= alone:
            others = ", ".join(map(repr, sorted(names - alone)))
            raise _not_trainable(given, f"{what}= for {others}, which is not a model of this Run")
    return {
        name: _train_state(name, each, optimizers.get(name), schedules.get(name), loader)
        for name, each in models.items()
    }


def _by_name(given: Given | Mapping[str, Given] | None) -> dict[str, Given]:
    if isinstance(given, Mapping):
        return dict(given)
    return {} if given is None else {_ALONE: given}


def _train_state(
    name: str,
    model: Step | nn.Module,
    optimizer: Optimizers | None,
    schedule: Schedules | None,
    loader: object,
) -> TrainState:
    if not (isinstance(name, str) and name.isprintable()):
        raise StepError(
            given=f"shoal.Run(directory, {{{name!r}: …}}, loader)",
            found=f"{name!r} is not a printable str",
            fix="use a short string for each Step or model, such as 'generator'",
        )
    if isinstance(model, Step):
        return model
    given = f"shoal.Run(directory, {type(model).__name__}, loader, …)"
    if not isinstance(model, nn.Module):
        raise _not_trainable(given, "neither a Step nor a model")
    engine = reading_engine(model, loader.world) if isinstance(loader, Loader) else engine_of(model)
    if optimizer is None:
        raise _not_trainable(given, "a model without optimizer=, which a checkpoint has to hold")
    if isinstance(engine, OtherToolEngine) and isinstance(loader, Loader):
        return OtherToolState(engine, optimizer, schedule, loader)
    if engine.loop is None:
        raise StepError(
            given=given,
            found="the strategy of this model runs complete steps, so a custom training loop can't "
            "train it",
            fix="shoal.Run(directory, shoal.Step(model, optimizer, task), loader)",
        )
    return TrainState(engine, optimizer, schedule)


def _not_trainable(given: str, found: str) -> StepError:
    return StepError(
        given=given,
        found=found,
        fix="use shoal.Run(directory, shoal.Step(model, optimizer, task), loader); in a custom "
        "training loop, use shoal.Run(directory, model, loader, optimizer=optimizer), or for several "
        "models shoal.Run(directory, {'a': a, 'b': b}, loader, optimizer={'a': …, 'b': …})",
    )
