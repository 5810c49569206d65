"""Recompute: units run again in backward, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shoal


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.drop(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def loss(output: Tensor, batch: tuple[Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def trained(world: shoal.World, *strategies: shoal.Recompute) -> tuple[list[Tensor], list[int]]:
    """Parameters after two steps, and how often each block ran in the second."""
    world.reseed("weights", by_rank=False)
    model = shoal.parallelize(Net(), world, strategies or None)
    step = shoal.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), shoal.Task(loss))
    first, second = shoal.Loader((torch.ones(8, 4),), world, batch_size=4).epochs(1)
    step(first)
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    before = [block.runs for block in blocks]
    step(second)
    runs = [block.runs - once for block, once in zip(blocks, before, strict=True)]
    assert [name for name, _ in model.named_modules()][1] == "blocks"
    return [p.detach().clone() for p in model.parameters()], runs


def test_units_run_twice_with_the_same_random_numbers(world: shoal.World) -> None:
    plain, once = trained(world)
    again, twice = trained(world, shoal.Recompute())
    some, mixed = trained(world, shoal.Recompute(units=("blocks.1",)))
    assert (once, twice, mixed) == ([1, 1], [2, 2], [1, 2])
    assert all(map(torch.equal, plain, again))
    assert all(map(torch.equal, plain, some))


def test_a_model_without_blocks_is_refused(world: shoal.World) -> None:
    with pytest.raises(shoal.StepError, match="no blocks that repeat"):
        shoal.parallelize(nn.Linear(2, 2), world, shoal.Recompute())
