"""Mistakes of the first hour: each raises an error with the correct line of code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.small_training import cross_entropy, sgd, step_of
from shoal import CheckpointError, DataError, LaunchError, StepError

DATA = (torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
API: Any = shoal
"""Without types: arguments are swapped, and of other types."""


@pytest.fixture
def given(world: shoal.World) -> SimpleNamespace:
    step = step_of(world, nn.Linear(2, 2), cross_entropy)
    loader = shoal.Loader(DATA, world, batch_size=4)
    return SimpleNamespace(
        world=world, model=step.model, optimizer=step.optimizer, step=step, loader=loader
    )


def train(given: Any, **options: Any) -> object:
    options = {"optimizer": sgd, "batch_size": 4, "epochs": 1, **options}
    task = shoal.Task(cross_entropy)
    options = {"world": given.world, **options}
    return shoal.train(nn.Linear(2, 2), task, DATA, directory="never", **options)


def load(given: Any, **options: Any) -> object:
    return shoal.Loader(DATA, given.world, **{"batch_size": 4, **options})


MISTAKES: list[tuple[Callable[[Any], object], type[shoal.ShoalError], str]] = [
    (lambda g: list(g.loader), DataError, "loader.epochs(10)"),
    (lambda g: g.loader.epochs("2"), DataError, "loader.epochs(2)"),
    (lambda g: g.loader.epochs(-1), DataError, "loader.epochs(10)"),
    (lambda g: g.loader.epochs(0.5), DataError, "loader.epochs(10)"),
    (lambda g: g.loader.epochs(3.0), DataError, "loader.epochs(3)"),
    (lambda g: load(g, batch_size=64.0), DataError, "batch_size=64"),
    (lambda g: load(g, shuffle="no"), DataError, "shuffle=False"),
    (lambda g: load(g, seed="1"), DataError, "seed=1"),
    (lambda g: load(g, num_workers=-1), DataError, "num_workers=4"),
    (
        lambda g: API.Loader(g.world, DATA, batch_size=4),
        DataError,
        "Loader(dataset, world, batch_size=64)",
    ),
    (lambda g: API.init(seed="1"), LaunchError, "seed=1"),
    (lambda g: API.init(timeout="600"), LaunchError, "timeout=600"),
    (lambda g: API.init(seed=1), LaunchError, "world.close()"),
    (lambda g: train(g, world=None), LaunchError, "world=world"),
    (lambda g: API.parallelize(g.world, nn.Linear(2, 2)), StepError, "shoal.parallelize(model, world)"),
    (lambda g: API.Task(None), StepError, "shoal.Task(loss)"),
    (lambda g: API.Task(cross_entropy, inputs=DATA), StepError, "shoal.Task(loss)"),
    (lambda g: g.step(DATA), StepError, "loader.epochs(10): step(batch)"),
    (lambda g: API.Step(g.optimizer, g.model, None), StepError, "shoal.Step(model, optimizer, task)"),
    (lambda g: API.Step(g.model, g.optimizer, API.Task(len), clip="1"), StepError, "clip=1.0"),
    (lambda g: API.LRSchedule(warmup_steps=50.0), StepError, "warmup_steps=50)"),
    (lambda g: API.LRSchedule()(g.optimizer, "100"), StepError, "len(loader) * epochs"),
    (lambda g: API.LRSchedule()(g.optimizer, -1), StepError, "len(loader) * epochs"),
    (lambda g: API.LRSchedule()(g.model, 100), StepError, "(…)(optimizer, len(loader) * epochs)"),
    (
        lambda g: API.Run(g.step, "runs/a", g.loader),
        CheckpointError,
        "shoal.Run('runs/a', step, loader)",
    ),
    (
        lambda g: API.Run("runs/a", g.step, g.loader, trackers="tensorboard"),
        StepError,
        "trackers=(shoal.TensorBoard(),)",
    ),
    (lambda g: API.export("model.pt", g.model), CheckpointError, "export(model, 'model.safetensors')"),
    (lambda g: API.load("model.pt", g.model), CheckpointError, "load(model, 'model.safetensors')"),
    (lambda g: API.EMA(g.optimizer), StepError, "shoal.EMA(model)"),
    (lambda g: train(g, epochs=0), StepError, "epochs=10"),
    (lambda g: train(g, epochs="3"), StepError, "epochs=3"),
    (lambda g: train(g, epochs=3.0), StepError, "epochs=3"),
    (lambda g: train(g, max_time="60"), StepError, "max_time=3600.0"),
    (lambda g: train(g, seed=5), StepError, "shoal.init(layout='replicate=-1', seed=5)"),
    (
        lambda g: train(g, optimizer=g.optimizer),
        StepError,
        "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    (
        lambda g: train(g, optimizer=torch.optim.AdamW),
        StepError,
        "optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)",
    ),
    (
        lambda g: train(g, optimizer=[g.optimizer]),
        StepError,
        "optimizer=lambda model: [torch.optim.Muon(…), torch.optim.AdamW(…)]",
    ),
    (lambda g: train(g, schedule=100), StepError, "schedule=shoal.LRSchedule(warmup_steps=100)"),
    (lambda g: train(g, validation=DATA), StepError, "validation=shoal.Validation(dataset="),
    (lambda g: train(g, ema=2.0), StepError, "decay=0.999"),
]


@pytest.mark.parametrize(("mistake", "kind", "fix"), MISTAKES)
def test_the_error_shows_the_correct_line(
    mistake: Callable[[Any], object],
    kind: type[shoal.ShoalError],
    fix: str,
    given: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
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
