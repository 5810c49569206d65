"""Experts that can't be divided over ranks, and calls with other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.causal_transformer import WIDTH
from helpers.mixtures import ExpertList, Experts, Mixture
from helpers.ranks import RankError, Ranks

pytestmark = pytest.mark.processes

EXPERTS = shoal.ExpertParallel()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, layout="expert=2") as started:
        yield started


class Centered(Experts):
    """Experts whose output for a token depends on the other tokens."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = super().forward(hidden, index, weights)
        return result - result.mean(0)


class Coupling(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Centered(4, 2 * WIDTH)
        self.double()


class AllFour(Experts):
    """Experts that loop over a number of their own."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = hidden.new_zeros(len(hidden), WIDTH)
        for expert in range(4):
            result = result + (hidden @ self.into[expert].T) @ self.out[expert].T
        return result


class Counting(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = AllFour(4, 2 * WIDTH)
        self.double()


class Buffered(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts.register_buffer("scale", torch.ones(4))


class Patched(Mixture):
    def __init__(self) -> None:
        super().__init__()
        vars(self.experts).update(forward=partial(vars(Centered)["forward"], self.experts))


class Tied(nn.Sequential):
    def __init__(self) -> None:
        one, other = Mixture(), Mixture()
        other.experts.into = one.experts.into
        super().__init__(one, other)


def refused(world: shoal.World, model: nn.Module, strategy: Any) -> None:
    shoal.parallelize(model, world, strategy)(torch.randn(6, 2 * WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), EXPERTS, "put the experts into a module of their own"),
        (Mixture(number=3), EXPERTS, "it has 3 experts"),
        (Counting(), EXPERTS, "loop over the experts that the module has"),
        (Mixture(), shoal.ExpertParallel(modules=("router",)), "not the layer with its router"),
        (Mixture(), shoal.ExpertParallel(modules=("expert",)), "no module of Mixture matches 'expert'"),
        (Mixture(), shoal.DDP(), "no strategy uses the 'expert' axis"),
        (Buffered(), EXPERTS, "all of scale, a buffer with a row for each expert"),
        (Patched(), EXPERTS, "its forward was replaced"),
        (Mixture(), [EXPERTS, shoal.LocalSGD()], "ranks step separately"),
        (Mixture(), [EXPERTS, shoal.DDP()], "or shoal.ExpertParallel() alone"),
        (Coupling(), EXPERTS, "each row of its output must be the sum"),
        (Tied(), EXPERTS, "they are different modules with the same parameters"),
    ],
    ids=[
        "no experts",
        "number",
        "count",
        "router",
        "pattern",
        "idle axis",
        "buffer",
        "patched",
        "LocalSGD",
        "DDP",
        "coupled",
        "tied",
    ],
)
def test_what_can_not_be_divided_is_refused(
    two: Ranks, model: nn.Module, strategy: Any, words: str
) -> None:
    for found in two.attempt(refused, model, strategy):
        assert isinstance(found, RankError)
        assert words in str(found.error)


def odd_arguments(world: shoal.World, index: Tensor, weights: Tensor) -> None:
    experts = shoal.parallelize(Experts(4, 8), world, EXPERTS)
    experts(torch.randn(6, 8), index, weights)


@pytest.mark.parametrize(
    ("index", "weights", "words"),
    [
        (torch.zeros(2, 3, 2).long(), torch.ones(6, 2), "index is of shape (2, 3, 2) and int64"),
        (torch.zeros(6, 2).long(), torch.ones(6, 2, 1), "weights of shape (6, 2, 1)"),
    ],
)
def test_arguments_of_other_shapes_are_refused(
    two: Ranks, index: Tensor, weights: Tensor, words: str
) -> None:
    for found in two.attempt(odd_arguments, index, weights):
        assert words in str(found.error)


class NarrowList(ExpertList):
    """Experts with a parameter of one row."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(number, width)
        for expert in self:
            expert.register_parameter("scale", nn.Parameter(torch.ones(1)))


def test_slices_without_rows_are_refused_with_fsdp() -> None:
    with Ranks(4, layout="shard=2,expert=2") as ranks:
        for found in ranks.attempt(refused, NarrowList(4, 8), EXPERTS):
            assert "its 1 row(s) leave a rank without any" in str(found.error)
