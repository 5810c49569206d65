"""A model with what a pipeline has to carry, and its training."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WIDTH, CLASSES, SAMPLES, STEPS = 8, 3, 53, 6
INNER = 12  # which 2, 3 and 4 divide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.narrow(F.relu(self.wide(values)))
        return values + added


class Net(nn.Module):
    """An input that the last stage needs again, a parameter and a buffer of its own, and blocks."""

    scale: Tensor

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.places = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: Tensor, scaled: bool = True) -> dict[str, Tensor]:
        hidden = self.first(values) + self.places
        kept = hidden
        for block in self.blocks:
            hidden = block(hidden)
        if scaled:
            hidden = hidden * self.scale
        return {"scores": self.head(hidden + kept) + values.sum(1, keepdim=True)}


def dataset() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def loss(output: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output["scores"], batch[1], reduction="sum"), len(batch[1])


def build(blocks: int = 3) -> Net:
    torch.manual_seed(2)
    return Net(blocks).double()


def parts(world: shoal.World, strategy: Any, make: Any = build) -> tuple[shoal.Step, shoal.Loader]:
    model = shoal.parallelize(make(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), clip=0.5)
    return step, shoal.Loader(dataset(), world, batch_size=16, micro_batches=4)


PIPELINE = shoal.Pipeline(split_points=("blocks.1",))


def log(
    world: shoal.World, strategy: Any, make: Any = build, compile: str | None = None
) -> list[float]:
    model = shoal.parallelize(make(), world, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = shoal.Step(model, optimizer, shoal.Task(loss), compile=compile)
    data = shoal.Loader(dataset(), world, batch_size=16, micro_batches=4)
    return [step(batch).loss for batch in itertools.islice(data.epochs(9), STEPS)]


class Chain(nn.Sequential):
    """One parameter in its first and its last part."""

    def __init__(self) -> None:
        tied = nn.Linear(4, 4)
        super().__init__(tied, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self[4].weight = tied.weight


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"scores": self.chain(values)[:, :CLASSES]}


def tied() -> nn.Module:
    torch.manual_seed(5)
    return Scores().double()
