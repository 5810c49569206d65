"""ActivationCheckpointing: units run again in backward, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def trained(
    world: shoal.World, *strategies: shoal.ActivationCheckpointing
) -> tuple[list[Tensor], list[int]]:
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
    again, twice = trained(world, shoal.ActivationCheckpointing())
    some, mixed = trained(world, shoal.ActivationCheckpointing(modules=("blocks.1",)))
    assert (once, twice, mixed) == ([1, 1], [2, 2], [1, 2])
    assert all(map(torch.equal, plain, again))
    assert all(map(torch.equal, plain, some))


def test_a_model_without_blocks_is_refused(world: shoal.World) -> None:
    with pytest.raises(shoal.StepError, match="no repeated blocks"):
        shoal.parallelize(nn.Linear(2, 2), world, shoal.ActivationCheckpointing())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query = torch.tanh(self.query(x))
        return x + self.out(F.scaled_dot_product_attention(query, x, x))  # type: ignore[no-any-return]


class Counted(TorchDispatchMode):
    """Counts the products, the attentions and the other operations of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        known = {"addmm": "products", "tanh": "tanh"}
        attention = name.startswith("_scaled_dot_product") and "backward" not in name
        self.counts["attention" if attention else known.get(name, "others")] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        ((), {"products": 2, "attention": 2, "tanh": 2}),
        (("products",), {"products": 1, "attention": 2, "tanh": 2}),
        (("attention",), {"products": 2, "attention": 1, "tanh": 2}),
        (("products", "attention"), {"products": 1, "attention": 1, "tanh": 2}),
    ],
)
def test_what_is_kept_is_not_computed_again(
    world: shoal.World, keep: tuple[str, ...], again: dict[str, int]
) -> None:
    gradients = []
    for strategy in (None, shoal.ActivationCheckpointing(modules=("0", "1"), save=keep)):
        world.reseed("weights", by_rank=False)
        model = shoal.parallelize(nn.Sequential(Attending(), Attending()), world, strategy)
        with Counted() as counted:
            model(torch.ones(2, 3, 4)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        if strategy is None:
            once = counted.counts
    for what, times in again.items():
        # The last product of a unit is never needed again: recomputation stops before it.
        spared = 2 if what == "products" and times == 2 else 0
        assert counted.counts[what] == times * once[what] - spared, what
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("keep", [("matmul",), "products"])
def test_unknown_words_are_refused(keep: Any) -> None:
    with pytest.raises(shoal.StepError, match=r"'products', 'attention'"):
        shoal.ActivationCheckpointing(save=keep)
