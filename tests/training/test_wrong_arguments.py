"""Mistakes of the first hour: each raises an error with the correct line of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

DATA = (torch.ones(8, 2), torch.zeros(8, dtype=torch.long))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


@pytest.fixture
def given() -> Iterator[SimpleNamespace]:
    with shoal.init() as world:
        model = shoal.parallelize(nn.Linear(2, 2), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = shoal.Step(model, optimizer, shoal.Task(loss))
        loader = shoal.Loader(DATA, world, batch_size=4)
        yield SimpleNamespace(world=world, model=model, optimizer=optimizer, step=step, loader=loader)


def train(given: Any, **options: Any) -> object:
    options = {"optimizer": new_sgd, "batch_size": 4, "epochs": 1, **options}
    return shoal.train(
        nn.Linear(2, 2), shoal.Task(loss), DATA, directory="never", world=given.world, **options
    )


def new_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MISTAKES: dict[str, tuple[Callable[[Any], object], type[shoal.ShoalError], str]] = {
    "a loop over the loader": (lambda g: list(g.loader), shoal.DataError, "loader.epochs(10)"),
    "epochs as text": (lambda g: g.loader.epochs("2"), shoal.DataError, "loader.epochs(10)"),
    "negative epochs": (lambda g: g.loader.epochs(-1), shoal.DataError, "loader.epochs(10)"),
    "half an epoch": (lambda g: g.loader.epochs(0.5), shoal.DataError, "loader.epochs(10)"),
    "whole epochs as a float": (lambda g: g.loader.epochs(3.0), shoal.DataError, "loader.epochs(3)"),
    "train, whole epochs as a float": (lambda g: train(g, epochs=3.0), shoal.StepError, "epochs=3,"),
    "a batch size as a float": (
        lambda g: shoal.Loader(DATA, g.world, batch_size=64.0),  # type: ignore[arg-type]
        shoal.DataError,
        "batch_size=64,",
    ),
    "warm-up steps as a float": (
        lambda g: shoal.LRSchedule(warmup_steps=50.0),  # type: ignore[arg-type]
        shoal.StepError,
        "warmup_steps=50)",
    ),
    "Loader, arguments swapped": (
        lambda g: shoal.Loader(g.world, DATA, batch_size=4),  # type: ignore[arg-type]
        shoal.DataError,
        "shoal.Loader(dataset, world, batch_size=64)",
    ),
    "shuffle as text": (
        lambda g: shoal.Loader(DATA, g.world, batch_size=4, shuffle="no"),  # type: ignore[arg-type]
        shoal.DataError,
        "shuffle=False",
    ),
    "a seed as text": (
        lambda g: shoal.Loader(DATA, g.world, batch_size=4, seed="1"),  # type: ignore[arg-type]
        shoal.DataError,
        "seed=0",
    ),
    "init, a seed as text": (
        lambda g: shoal.init(seed="1"),  # type: ignore[arg-type]
        shoal.LaunchError,
        "seed=0",
    ),
    "train, a seed beside a world": (
        lambda g: train(g, seed=5),
        shoal.StepError,
        "shoal.init(layout='replicate=-1', seed=5)",
    ),
    "negative workers": (
        lambda g: shoal.Loader(DATA, g.world, batch_size=4, num_workers=-1),
        shoal.DataError,
        "num_workers=4",
    ),
    "parallelize, arguments swapped": (
        lambda g: shoal.parallelize(g.world, nn.Linear(2, 2)),  # type: ignore[arg-type]
        shoal.StepError,
        "shoal.parallelize(model, world)",
    ),
    "a step on tensors": (lambda g: g.step(DATA), shoal.StepError, "loader.epochs(10): step(batch)"),
    "clip as text": (
        lambda g: shoal.Step(g.model, g.optimizer, shoal.Task(loss), clip="1"),  # type: ignore[arg-type]
        shoal.StepError,
        "clip=1.0",
    ),
    "a Task without a loss": (
        lambda g: shoal.Task(None),  # type: ignore[arg-type]
        shoal.StepError,
        "shoal.Task(loss)",
    ),
    "a Task with a batch as inputs": (
        lambda g: shoal.Task(loss, inputs=DATA),  # type: ignore[arg-type]
        shoal.StepError,
        "shoal.Task(loss)",
    ),
    "a schedule of a text": (
        lambda g: shoal.LRSchedule()(g.optimizer, "100"),  # type: ignore[arg-type]
        shoal.StepError,
        "len(loader) * epochs",
    ),
    "an optimizer in train": (
        lambda g: train(g, optimizer=g.optimizer),
        shoal.StepError,
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "a class of optimizers in train": (
        lambda g: train(g, optimizer=torch.optim.AdamW),
        shoal.StepError,
        "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)",
    ),
    "train for no epochs": (lambda g: train(g, epochs=0), shoal.StepError, "epochs=10"),
    "train for epochs as text": (lambda g: train(g, epochs="3"), shoal.StepError, "epochs=10"),
    "a timeout as text": (
        lambda g: shoal.init(timeout="600"),  # type: ignore[arg-type]
        shoal.LaunchError,
        "timeout=600",
    ),
    "Run, arguments swapped": (
        lambda g: shoal.Run(g.step, "runs/a", g.loader),  # type: ignore[arg-type]
        shoal.CheckpointError,
        "shoal.Run('runs/a', step, loader)",
    ),
    "a tracker by its name": (
        lambda g: shoal.Run("runs/a", g.step, g.loader, trackers="tensorboard"),  # type: ignore[arg-type]
        shoal.StepError,
        "trackers=(shoal.TensorBoard(),)",
    ),
    "Step, arguments swapped": (
        lambda g: shoal.Step(g.optimizer, g.model, shoal.Task(loss)),
        shoal.StepError,
        "shoal.Step(model, optimizer, task)",
    ),
    "export, arguments swapped": (
        lambda g: shoal.export("model.pt", g.model),  # type: ignore[arg-type]
        shoal.CheckpointError,
        "shoal.export(model, 'model.safetensors')",
    ),
    "load, arguments swapped": (
        lambda g: shoal.load("model.pt", g.model),  # type: ignore[arg-type]
        shoal.CheckpointError,
        "shoal.load(model, 'model.safetensors')",
    ),
    "EMA of an optimizer": (
        lambda g: shoal.EMA(g.optimizer),
        shoal.StepError,
        "shoal.EMA(model)",
    ),
    "a schedule of a model": (
        lambda g: shoal.LRSchedule()(g.model, 100),
        shoal.StepError,
        "LRSchedule(…)(optimizer, len(loader) * epochs)",
    ),
    "a schedule of no steps": (
        lambda g: shoal.LRSchedule()(g.optimizer, -1),
        shoal.StepError,
        "len(loader) * epochs",
    ),
    "a number for a schedule in train": (
        lambda g: train(g, schedule=100),
        shoal.StepError,
        "schedule=shoal.LRSchedule(warmup_steps=100)",
    ),
    "a dataset for the validation in train": (
        lambda g: train(g, validation=DATA),
        shoal.StepError,
        "validation=shoal.Validation(dataset=",
    ),
    "a number for the EMA in train": (
        lambda g: train(g, ema=2.0),
        shoal.StepError,
        "decay=0.999",
    ),
    "a time as text": (lambda g: train(g, max_time="60"), shoal.StepError, "max_time=3600.0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_shows_the_correct_line(
    name: str, given: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mistake, kind, fix = MISTAKES[name]
    with pytest.raises(kind) as raised:
        mistake(given)
    assert fix in raised.value.fix
    assert list(tmp_path.iterdir()) == []  # nothing was written


@pytest.mark.parametrize(
    ("name", "meant"),
    [("parallelise", "parallelize"), ("DataLoader", "Loader"), ("Accuracy_", "Accuracy"), ("fsdp", "")],
)
def test_a_misspelt_name_is_recognized(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(shoal, name)
    assert str(raised.value).endswith(f"; did you mean shoal.{meant}?" if meant else f"{name!r}")
