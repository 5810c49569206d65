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
from shoal.data.orders import Shuffled, uniform
from shoal.data.sampler import RankSampler as Shares
from shoal.util.errors import DataError

stats = LazyModule("scipy.stats")

SIZE, BATCH = 50, 8
DATA = torch.arange(SIZE)
LENGTHS = [1 + (7 * n) % 40 for n in range(SIZE)]


def seen(loader: shoal.Loader, epochs: int, stop: int | None = None) -> list[list[int]]:
    found = []
    for batch in loader.epochs(epochs):
        found.append([int(i) for micro in batch.micros if micro.weight for i in micro.value])
        assert len(found[-1]) == batch.size
        if len(found) == stop:
            break
    return found


def build(world: shoal.World, **options: Any) -> shoal.Loader:
    return shoal.Loader(DATA, world, **({"batch_size": BATCH, "seed": 3} | options))


class ByEpoch(Sampler[int]):
    """Deterministic given the epoch, as samplers that resume are."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SIZE // 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(SIZE, generator=generator)[: SIZE // 2].tolist()


ORDERS = [shoal.WeightedSampling(range(SIZE), size=31), ByEpoch(), SequentialSampler(DATA)]


@pytest.mark.parametrize("order", ORDERS, ids=["weighted", "by epoch", "sequential"])
@pytest.mark.parametrize("stop", [1, 5, 9])
def test_an_order_of_ones_own_resumes_anywhere(world: shoal.World, order: Any, stop: int) -> None:
    whole = seen(build(world, order=order), 3)
    first, second = (build(world, order=order) for _ in range(2))
    begun = seen(first, 3, stop)
    second.load_state_dict(first.state_dict())
    assert begun + seen(second, 3) == whole


def test_a_sampler_of_torch_is_asked_for_each_epoch(world: shoal.World) -> None:
    sampler = ByEpoch()
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    loader = build(world, order=sampler)
    assert loader.epoch_size == SIZE // 2
    assert [index for batch in seen(loader, 3) for index in batch] == expected


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


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (RandomSampler(DATA), "different indices each time"),
        (WeightedRandomSampler([1.0] * SIZE, SIZE), "draws from a generator"),
        (DistributedSampler(TensorDataset(DATA), 2, 0), "splits the batches over ranks"),
        (BatchSampler(SequentialSampler(DATA), 4, False), "yields batches"),
        (shoal.WeightedSampling([1.0, 2.0]), "a dataset of 50 samples"),
        (list(range(SIZE)), "it has no method"),
    ],
)
def test_what_is_no_order(world: shoal.World, order: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        build(world, order=order)


@pytest.mark.parametrize("value", [SIZE, -1, 0.5])
def test_indices_are_looked_at(world: shoal.World, value: Any) -> None:
    with pytest.raises(DataError, match="one integer from 0 to 49"):
        seen(build(world, order=Strange(value)), 1)


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


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_batches_of_a_budget_resume(world: shoal.World, stop: int) -> None:
    budget = shoal.TokenBudget(LENGTHS, 60)
    whole = seen(build(world, batch_size=budget, num_workers=1), 3)
    first, second = (build(world, batch_size=budget) for _ in range(2))
    begun = seen(first, 3, stop)
    second.load_state_dict(first.state_dict())
    assert begun + seen(second, 3) == whole


def test_batches_of_a_budget_are_the_same_on_any_number_of_ranks() -> None:
    cuts = []
    for ranks in (1, 2, 4):
        shares = [
            [
                share
                for block in Shares(
                    order=Shuffled(SIZE, shuffle=True),
                    batch_size=shoal.TokenBudget(LENGTHS, 60),
                    ranks=ranks,
                    rank=rank,
                    micro_batches=2,
                    seed=3,
                    drop_last=False,
                ).shares(0, 2 * SIZE, 3)
                for share in block
            ]
            for rank in range(ranks)
        ]
        cuts.append([(share.first, share.size) for share in shares[0]])
        assert all([(s.first, s.size) for s in of_rank] == cuts[0] for of_rank in shares)
        real = [
            share.first + place
            for of_rank in shares
            for share in of_rank
            for cell in share.cells
            if cell.weight
            for place in range(cell.start, cell.stop)
        ]
        assert sorted(real) == list(range(2 * SIZE))
    assert cuts[0] == cuts[1] == cuts[2]


def test_a_sample_beyond_the_budget_is_a_batch_of_its_own(world: shoal.World) -> None:
    assert all(
        len(batch) == 1 for batch in seen(build(world, batch_size=shoal.TokenBudget([9] * SIZE, 5)), 1)
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"batch_size": shoal.TokenBudget([1] * 9, 5)}, "the order contains sample"),
        (
            {"batch_size": shoal.TokenBudget(LENGTHS, 5), "drop_last": True},
            "batches vary in size, so no batch is short",
        ),
    ],
)
def test_budgets_that_can_not_work(world: shoal.World, options: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        seen(build(world, **options), 1)


def test_a_rule_that_takes_nothing(world: shoal.World) -> None:
    class Nothing:
        max_samples = 4

        def __call__(self, indices: Any) -> int:
            return 0

    with pytest.raises(DataError, match="it returned 0"):
        seen(build(world, batch_size=Nothing()), 1)


def test_how_many_batches_a_budget_makes_is_not_known(world: shoal.World) -> None:
    with pytest.raises(DataError, match="known only after the epoch"):
        len(build(world, batch_size=shoal.TokenBudget(LENGTHS, 60)))
