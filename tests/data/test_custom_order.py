"""Orders and batch sizes of the user's own: weights, samplers of torch, budgets of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shoal
from helpers.lazy import LazyModule
from helpers.loaders import read, seen
from shoal.data.orders import Shuffled, uniform
from shoal.data.sampler import LocalBatch, RankSampler
from shoal.util.errors import DataError

stats = LazyModule("scipy.stats")

SIZE, BATCH = 50, 8
DATA = torch.arange(SIZE)
LENGTHS = [1 + (7 * n) % 40 for n in range(SIZE)]


def build(world: shoal.World, **options: Any) -> shoal.Loader:
    return shoal.Loader(DATA, world, **({"batch_size": BATCH, "seed": 3} | options))


class OfEpoch(Sampler[int]):
    """A sampler whose indices are the number of the epoch."""

    epoch = -1

    def __len__(self) -> int:
        return SIZE // 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(self.epoch, SIZE // 2)


def test_a_sampler_of_torch_is_asked_for_each_epoch(world: shoal.World) -> None:
    loader = build(world, order=OfEpoch())
    assert loader.epoch_size == SIZE // 2
    assert read(loader, 3) == [0] * 25 + [1] * 25 + [2] * 25


def test_weights_are_probabilities() -> None:
    weights = np.array([0, 3, 0, 1, 2, 0.5, 0])
    order = shoal.WeightedSampling(weights)
    taken = [order.take(np.arange(20_000), seed=3, epoch=epoch) for epoch in range(2)]
    for indices in taken:
        counts = np.bincount(indices, minlength=len(weights))
        assert not counts[weights == 0].any()
        expected = weights[weights > 0] / weights.sum() * len(indices)
        assert stats.chisquare(counts[weights > 0], expected).pvalue > 1e-4
    assert (taken[0] != taken[1]).mean() > 0.5


def test_uniform_numbers_are_uniform_and_no_neighbours_relatives() -> None:
    numbers = uniform(np.arange(40_000), seed=0, epoch=0)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers, uniform(np.arange(40_000), seed=0, epoch=1))[0, 1]) < 0.03


class Strange:
    """An order that gives what it is told to give."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __len__(self) -> int:
        return SIZE

    def take(self, positions: Any, *, seed: int, epoch: int) -> Any:
        return np.full(len(positions), self.value)


def test_what_is_no_order(world: shoal.World) -> None:
    for order, found in (
        (RandomSampler(DATA), "different indices each time"),
        (WeightedRandomSampler([1.0] * SIZE, SIZE), "draws from a generator"),
        (DistributedSampler(TensorDataset(DATA), 2, 0), "splits the batches over ranks"),
        (BatchSampler(SequentialSampler(DATA), 4, False), "yields batches"),
        (shoal.WeightedSampling([1.0, 2.0]), "a dataset of 50 samples"),
        (list(range(SIZE)), "it has no method"),
    ):
        with pytest.raises(DataError, match=found):
            build(world, order=order)
    for value in (SIZE, -1, 0.5):
        with pytest.raises(DataError, match="one integer from 0 to 49"):
            read(build(world, order=Strange(value)), 1)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [[1.0]]])
def test_weights_from_which_nothing_can_be_drawn(weights: Any) -> None:
    with pytest.raises(DataError, match="one finite number"):
        shoal.WeightedSampling(weights)


@pytest.mark.parametrize("unit", [1e308, 5e-324])
def test_weights_of_any_size_are_only_compared(unit: float) -> None:
    positions = np.arange(4000)
    usual = shoal.WeightedSampling([1, 3, 0, 1, 1]).take(positions, seed=0, epoch=0)
    largest = unit if unit > 1 else 3 * unit
    odd = shoal.WeightedSampling([largest / 3, largest, 0, largest / 3, largest / 3])
    assert (odd.take(positions, seed=0, epoch=0) == usual).mean() > 0.999


@pytest.mark.parametrize("lengths", [[0.9, 0.9], [float("nan")], ["abc"], [-1], [[1]]])
def test_lengths_that_are_no_whole_numbers(lengths: Any) -> None:
    with pytest.raises(DataError, match="one integer"):
        shoal.TokenBudget(lengths, 10)


def test_a_state_of_another_order_is_refused(world: shoal.World) -> None:
    state = build(world, order=shoal.WeightedSampling([1.0] * SIZE)).state_dict()
    for other in ({}, {"order": shoal.WeightedSampling(range(SIZE))}):
        with pytest.raises(DataError, match="written with a custom order"):
            build(world, **other).load_state_dict(state)


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_is_filled_and_never_exceeded(world: shoal.World, padded: bool) -> None:
    budget = shoal.TokenBudget(LENGTHS, 100, max_samples=6, padded=padded)
    batches = seen(build(world, batch_size=budget), 2)
    assert sorted(index for batch in batches for index in batch) == sorted([*range(SIZE)] * 2)
    sizes = {len(batch) for batch in batches}
    assert len(sizes) > 1

    def tokens(batch: list[int]) -> int:
        lengths = [LENGTHS[index] for index in batch]
        return max(lengths) * len(lengths) if padded else sum(lengths)

    assert all(tokens(batch) <= 100 for batch in batches)
    taken = 0
    for batch, following in itertools.pairwise(batches):
        taken += len(batch)
        if taken % SIZE and len(batch) < 6:
            assert tokens([*batch, following[0]]) > 100


def shares(ranks: int, rank: int) -> list[LocalBatch]:
    sampler = RankSampler(
        order=Shuffled(SIZE, shuffle=True),
        batch_size=shoal.TokenBudget(LENGTHS, 60),
        ranks=ranks,
        rank=rank,
        micro_batches=2,
        seed=3,
        drop_last=False,
    )
    return [*itertools.chain(*sampler.shares(0, 2 * SIZE, 3))]


def test_batches_of_a_budget_are_the_same_on_any_number_of_ranks() -> None:
    cuts = [(share.first, share.size) for share in shares(1, 0)]
    for ranks in (1, 2, 4):
        real: list[int] = []
        for rank in range(ranks):
            mine = shares(ranks, rank)
            assert [(share.first, share.size) for share in mine] == cuts
            for share in mine:
                for cell in share.cells:
                    if cell.weight:
                        real += range(share.first + cell.start, share.first + cell.stop)
        assert sorted(real) == list(range(2 * SIZE))


def test_a_sample_beyond_the_budget_is_a_batch_of_its_own(world: shoal.World) -> None:
    batches = seen(build(world, batch_size=shoal.TokenBudget([9] * SIZE, 5)), 1)
    assert [len(batch) for batch in batches] == [1] * SIZE


class Nothing:
    """A rule that takes no sample."""

    max_samples = 4

    def __call__(self, indices: Any) -> int:
        return 0


def test_budgets_that_can_not_work(world: shoal.World) -> None:
    small = shoal.TokenBudget(LENGTHS, 5)
    for options, found in (
        ({"batch_size": shoal.TokenBudget([1] * 9, 5)}, "the order contains sample"),
        ({"batch_size": small, "drop_last": True}, "batches vary in size, so no batch is short"),
        ({"batch_size": Nothing()}, "it returned 0"),
    ):
        with pytest.raises(DataError, match=found):
            read(build(world, **options), 1)
    with pytest.raises(DataError, match="known only after the epoch"):
        len(build(world, batch_size=small))
