"""A model enters few modules of Shoal in `parallelize`, and a batch few in a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn

import shoal
from shoal.data.batch import Batch
from shoal.data.micro import MicroBatch
from shoal.strategies.contracts import Engine
from shoal.strategies.local import local_engine


@contextmanager
def following(carried: Callable[[object], bool]) -> Iterator[list[str]]:
    """Note the modules of Shoal whose functions get a value that is `carried`, one after the other."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code, name = frame.f_code, frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("shoal.") or code.co_name.startswith("<"):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if entered[-1:] != [name] and any(carried(frame.f_locals.get(each)) for each in arguments):
            entered.append(name)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


class Applied:
    """A strategy at which the trip of a model through `parallelize` ends."""

    axes: ClassVar[tuple[str, ...]] = ("replicate",)
    defers: ClassVar[bool] = False

    def apply(self, model: nn.Module, world: shoal.World) -> Engine:
        sys.setprofile(None)
        return local_engine(model, world)


def loss(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


def test_a_model_enters_few_modules_before_its_strategy(world: shoal.World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with following(lambda value: value is model) as entered:
        shoal.parallelize(model, world, Applied())
    assert len({*entered}) <= 6, entered
    assert len(entered) - len({*entered}) <= 2, entered  # returns


def test_a_batch_enters_few_modules(world: shoal.World) -> None:
    model = shoal.parallelize(nn.Linear(4, 1), world)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    loader = shoal.Loader((torch.ones(16, 4),), world, batch_size=4, micro_batches=2)
    for batch in loader.epochs(1):
        first = step.number == 0
        with following(lambda value: isinstance(value, Batch | MicroBatch)) as entered:
            step(batch)
        assert len({*entered}) <= (10 if first else 8), entered
