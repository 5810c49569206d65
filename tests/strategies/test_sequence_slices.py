"""Context: what is cut of a unit's arguments, what counts as equal, and a world without the axis."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shoal
from helpers.causal_transformer import GPT, texts
from shoal.strategies.context_parallel.sequence_slices import _sequence_dim
from shoal.strategies.tolerance import distance


def test_without_the_axis_nothing_changes(world: shoal.World) -> None:
    torch.manual_seed(0)
    model = GPT()
    expected = model(texts()[0])
    parallel = shoal.parallelize(model, world, shoal.ContextParallel())
    assert not any("forward" in vars(module) for module in parallel.modules())
    assert torch.equal(parallel(texts()[0]), expected)


@pytest.mark.parametrize(
    ("model", "units", "words"),
    [
        (nn.Linear(2, 2), None, "no repeated blocks"),
        (GPT(), ("layers.*",), "no module of GPT matches"),
        (GPT(), ("blocks.*", "blocks.*.norm"), "blocks.0.norm is a unit inside another"),
        (GPT(), ("", "blocks.*"), "blocks.0 is a unit inside another"),
    ],
)
def test_units_that_are_none_are_refused_at_once(
    world: shoal.World, model: nn.Module, units: tuple[str, ...] | None, words: str
) -> None:
    with pytest.raises(shoal.StepError, match=words):
        shoal.parallelize(model, world, shoal.ContextParallel(modules=units))


@pytest.mark.parametrize(
    ("shape", "batch", "dim"),
    [
        ((3, 12, 8), 3, 1),  # the hidden state
        ((3, 12, 12), 3, 1),  # with as many features
        ((12, 12, 8), 12, 1),  # or samples as positions
        ((3, 12), 3, 1),  # a number for each token
        ((1, 12), 12, 1),
        ((12,), 3, 0),
        ((12, 4), 3, 0),  # a table
        ((12, 12), 3, 0),  # a mask, refused in attention
        ((12, 1, 4), 3, 0),
        ((1, 12, 4), 12, 1),
        ((1, 1, 12, 4), 3, 2),
        ((3, 1, 12, 12), 3, 2),
        ((3, 8), 3, None),  # a row for each sample
        ((3,), 3, None),
        ((3, 7, 12), 3, None),
        ((), 3, None),
    ],
)
def test_what_runs_along_a_sequence_of_twelve(
    shape: tuple[int, ...], batch: int, dim: int | None
) -> None:
    assert _sequence_dim(torch.zeros(shape), batch, 12, "unit") == dim


@pytest.mark.parametrize("shape", [(12,), (12, 4), (12, 12), (12, 1, 4)])
def test_what_may_be_samples_or_positions_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(shoal.StepError, match="batch and sequence both have length 12"):
        _sequence_dim(torch.zeros(shape), 12, 12, "unit")


def test_distance_is_relative_and_knows_masks() -> None:
    one = torch.tensor([4.0, -math.inf, math.nan])
    assert distance(one, one) == 0.0
    assert distance(one + 1.0, one) == 0.25
    assert distance(one, torch.tensor([4.0, 0.0, math.nan])) == math.inf
    assert distance(one, torch.tensor([4.0, -math.inf, 0.0])) == math.inf
    assert distance(one, one[:2]) == math.inf
    assert distance(one[:0], one[:0]) == 0.0
