"""Mistakes of the first hour: each raises an error with the correct line of code."""

from __future__ import annotations

import inspect
import pickle
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
    (lambda g: API.init(seed=1), LaunchError, "end its `with` block"),
    (lambda g: train(g, world=None, seed=1), LaunchError, "world=world"),
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


CALLS: list[tuple[Callable[[Any], object], str, str]] = [
    (lambda g: API.init(world_size=2), "argument world_size", "shoal.init()"),
    (lambda g: API.parallelize(g.model), "'world'", "shoal.parallelize(model, world)"),
    (
        lambda g: API.Step(g.model, g.optimizer, API.Task(len), scheduler=None),
        "argument scheduler",
        "shoal.Step(model, optimizer, task, schedule=…)",
    ),
    (
        lambda g: API.Step(g.model, g.optimizer, task=API.Task(len), max_grad_norm=1.0),
        "argument max_grad_norm",
        "shoal.Step(model, optimizer, task, clip=…)",
    ),
    (
        lambda g: API.Loader(DATA, g.world, batch=8),
        "argument batch; missing a required argument: 'batch_size'",
        "shoal.Loader(dataset, world, batch_size=…)",
    ),
    (lambda g: API.Loader(DATA, g.world, 8), "too many", "shoal.Loader(dataset, world, batch_size=…)"),
    (lambda g: API.Run("a", g.step), "'loader'", "shoal.Run(directory, model, loader)"),
    (lambda g: train(g, epoch=1), "argument epoch;", "batch_size=…, epochs=…)"),
    (lambda g: API.FSDP(dtype=1), "argument dtype", "shoal.FSDP("),
]


@pytest.mark.parametrize(("call", "found", "fix"), CALLS)
def test_a_call_that_does_not_fit_shows_the_arguments(
    call: Callable[[Any], object], found: str, fix: str, given: SimpleNamespace
) -> None:
    with pytest.raises(shoal.ShoalError) as raised:
        call(given)
    assert raised.value.given.startswith("shoal.")
    assert found in raised.value.found
    assert fix in raised.value.fix


def test_an_error_inside_of_a_call_and_its_signature_stay(world: shoal.World) -> None:
    with pytest.raises(TypeError, match="inside"):
        shoal.parallelize(inner, world)
    assert list(inspect.signature(shoal.parallelize).parameters)[:2] == ["model", "world"]
    assert list(inspect.signature(shoal.Step).parameters)[:2] == ["model", "optimizer"]
    assert pickle.loads(pickle.dumps(shoal.evaluate)) is shoal.evaluate


def inner() -> nn.Module:
    raise TypeError("inside")


def test_the_name_of_another_tool_is_recognized(world: Any) -> None:
    with pytest.raises(AttributeError, match=r"world_size'; did you mean world\.size\?"):
        _ = world.world_size
    with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
        _ = world.colour


@pytest.mark.parametrize(
    ("name", "meant"),
    [("parallelise", "parallelize"), ("DataLoader", "Loader"), ("Accuracy_", "Accuracy"), ("fsdp", "")],
)
def test_a_misspelt_name_is_recognized(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(shoal, name)
    assert str(raised.value).endswith(f"; did you mean shoal.{meant}?" if meant else f"{name!r}")
