"""Draws as in the forward of a micro-batch, without a model, a loader or a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.data.micro import CURRENT_DRAWS, Draws, MicroBatch
from shoal.strategies.random_draws.draws import register


def keyed(call: Callable[[], Any], micro: MicroBatch, seed: int = 0) -> Any:
    """The result of `call` in a forward on `micro`."""
    token = CURRENT_DRAWS.set(Draws(micro, seed))
    try:
        return call()
    finally:
        CURRENT_DRAWS.reset(token)


class Calling(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Tensor:
        return self.function()


def draw(function: Callable[[], Tensor], first: int = 0, samples: int = 64, seed: int = 0) -> Tensor:
    """The result of `function` in a registered module, for samples from the position `first` on."""
    module = Calling(function)
    register(module)
    found: Tensor = keyed(module, MicroBatch(None, first, samples, 1.0), seed)
    return found


class Drawing(nn.Module):
    """Two modules that draw twice for each sample, and once for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        for part in self.parts:
            part.register_forward_hook(lambda *_: [*torch.rand(SAMPLES, 4), torch.rand(7)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [row for _ in range(2) for part in self.parts for row in part(x)]


SAMPLES = 3


def rows_drawn(world: shoal.World) -> list[tuple[float, ...]]:
    """The numbers of each sample and site in two epochs, for two seeds."""
    rows = []
    for seed in (0, 1):
        model = shoal.parallelize(Drawing(), world)
        data = (torch.zeros(2 * SAMPLES, 1),)
        for batch in shoal.Loader(data, world, batch_size=SAMPLES, seed=seed).epochs(2):
            for (x,) in batch:
                rows += [tuple(row.tolist()) for row in model(x)]
    return rows
