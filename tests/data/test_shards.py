"""Shards: each sample once in an epoch, in the same place on any number of ranks and workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from helpers.lazy import LazyModule
from shoal.data.sampler import RankSampler
from shoal.data.shards import Lanes, ShardSource
from shoal.util.errors import DataError

datasets = LazyModule("datasets")

BATCH = 16
LENGTHS = np.random.default_rng(5).integers(0, 40, 25).tolist()
STARTS = [0, *itertools.accumulate(LENGTHS)]
SIZE = sum(LENGTHS)


class Shards:
    """Shards of numbered samples; knows how often it was opened, and what was read."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self.yielded = 0

    def __call__(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        for number in range(STARTS[shard] + start, STARTS[shard + 1]):
            self.yielded += 1
            yield number


def stream(**options: Any) -> shoal.ShardedDataset[int]:
    given = {"lengths": LENGTHS, "interleave": 8} | options
    return shoal.ShardedDataset(range(len(LENGTHS)), Shards(), **given)


def build(world: shoal.World, data: Any = None, **options: Any) -> shoal.Loader:
    data = stream() if data is None else data
    return shoal.Loader(data, world, **({"batch_size": BATCH, "seed": 3} | options))


def seen(loader: shoal.Loader, epochs: int, stop: int | None = None) -> list[int]:
    found = []
    for number, batch in enumerate(loader.epochs(epochs), 1):
        found += [int(i) for micro in batch.micros if micro.weight for i in micro.value]
        if number == stop:
            break
    return found


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any),
    lanes=st.integers(1, 12),
    chunk=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_lanes_are_an_order_of_all_samples(
    lengths: list[int], lanes: int, chunk: int, shuffle: bool
) -> None:
    order = Lanes(lengths, lanes=lanes, chunk=chunk, shuffle=shuffle)
    positions = np.arange(sum(lengths))
    whole = order.take(positions, seed=3, epoch=1)
    assert sorted(whole.tolist()) == positions.tolist()
    some = positions[::3][::-1]
    assert order.take(some, seed=3, epoch=1).tolist() == whole[some].tolist()


def test_one_lane_keeps_the_samples_in_their_order(world: shoal.World) -> None:
    assert seen(build(world, stream(interleave=1), shuffle=False), 1) == list(range(SIZE))


def test_epochs_have_all_samples_in_other_orders(world: shoal.World) -> None:
    found = seen(build(world), 2)
    one, two = found[:SIZE], found[SIZE:]
    assert sorted(one) == sorted(two) == list(range(SIZE))
    assert one != two


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"micro_batches": 3}])
def test_workers_and_micro_batches_change_nothing(world: shoal.World, options: Any) -> None:
    assert seen(build(world, **options), 2) == seen(build(world), 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 20, 40])
@pytest.mark.parametrize("batch_size", [BATCH, 7])
def test_it_resumes_anywhere_even_in_other_batches(
    world: shoal.World, num_workers: int, stop: int, batch_size: int
) -> None:
    first = build(world)
    begun = seen(first, 2, stop)
    second = build(world, num_workers=num_workers, batch_size=batch_size)
    second.load_state_dict(first.state_dict())
    assert begun + seen(second, 2) == seen(build(world), 2)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (4, 1), (4, 4)])
def test_each_process_reads_lanes_of_its_own(ranks: int, workers: int) -> None:
    """What all of them read together is hardly more than there is."""
    lengths = [4000] * 16
    opened: list[tuple[int, int]] = []
    read = [0]

    def shard(number: int, start: int) -> Iterable[int]:
        opened.append((number, start))
        for sample in range(start, 4000):
            read[0] += 1
            yield sample

    data = shoal.ShardedDataset(range(16), shard, lengths=lengths, interleave=16)
    for rank, worker in itertools.product(range(ranks), range(workers)):
        source = ShardSource(data, torch.tensor, 0, seed_transforms=False)
        order = Lanes(lengths, lanes=16, chunk=16, shuffle=True)
        shares = RankSampler(
            order=order,
            batch_size=64,
            ranks=ranks,
            rank=rank,
            micro_batches=1,
            seed=0,
            drop_last=False,
        ).shares(0, 64000, 1)
        for number, block in enumerate(shares):
            if number % workers == worker:
                source[block]
    assert read[0] <= 64000 * 1.02
    assert len(opened) <= 64


def test_a_million_samples_are_sought_not_read(world: shoal.World) -> None:
    read = [0]

    def shard(number: int, start: int) -> Iterable[int]:
        for sample in range(start, 250_000):
            read[0] += 1
            yield number * 250_000 + sample

    data = shoal.ShardedDataset(range(4), shard, lengths=[250_000] * 4)
    loader = shoal.Loader(data, world, batch_size=64)
    loader.load_state_dict(loader.state_dict() | {"position": 900_000})
    [batch] = itertools.islice(loader.epochs(1), 1)
    assert len(set(batch.micros[0].value.tolist())) == 64
    assert read[0] <= 64


def test_lengths_that_are_not_known_are_counted_once(world: shoal.World) -> None:
    data = stream(lengths=None)
    assert seen(build(world, data), 1) == seen(build(world), 1)
    assert data.lengths == LENGTHS
    read = data.read
    assert isinstance(read, Shards)
    before = read.yielded
    build(world, data)
    assert read.yielded == before


@pytest.mark.parametrize(("wrong", "found"), [(-1, "continues after"), (1, "ended before sample")])
def test_a_shard_of_another_length_is_noticed(world: shoal.World, wrong: int, found: str) -> None:
    lengths = [length + wrong if number == 3 else length for number, length in enumerate(LENGTHS)]
    with pytest.raises(DataError, match=found):
        seen(build(world, stream(lengths=lengths, interleave=1), shuffle=False), 1)


def test_a_state_of_other_shards_is_refused(world: shoal.World) -> None:
    state = build(world).state_dict()
    swapped = [*LENGTHS[1:], LENGTHS[0]]
    for other in (stream(lengths=swapped), stream(interleave=4), torch.arange(SIZE)):
        with pytest.raises(DataError, match="shards and lanes of checksum"):
            build(world, other).load_state_dict(state)


def test_shards_of_one_length_in_another_order_are_refused(world: shoal.World) -> None:
    def loader(*names: str) -> shoal.Loader:
        stream = shoal.ShardedDataset(
            [Path("shards") / name for name in names], read, lengths=[5] * len(names)
        )
        return shoal.Loader(stream, world, batch_size=4)

    def read(shard: Path, start: int) -> Iterator[int]:
        return iter(range(start, 5))

    state = loader("a", "b", "c").state_dict()
    loader("a", "b", "c").check_state(state)
    with pytest.raises(shoal.DataError, match="checksum"):
        loader("b", "a", "c").check_state(state)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"lengths": [1]}, "lengths has one number of samples"),
        ({"interleave": 0}, "no shards, or interleave below 1"),
    ],
)
def test_what_is_no_stream(options: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        stream(**options)


def test_a_stream_has_no_other_order(world: shoal.World) -> None:
    with pytest.raises(DataError, match="not at random"):
        build(world, order=shoal.WeightedSampling([1.0] * SIZE))
    with pytest.raises(DataError, match="without samples"):
        build(world, shoal.ShardedDataset([0], lambda shard, start: iter(())))


def test_a_collate_function_and_global_generators(world: shoal.World) -> None:
    def noisy(shard: int, start: int) -> Iterator[tuple[int, float]]:
        for number in range(STARTS[shard] + start, STARTS[shard + 1]):
            yield number, random.random()

    def drawn(loader: shoal.Loader, stop: int | None = None) -> list[Any]:
        batches = itertools.islice(loader.epochs(1), stop)
        return [pair for batch in batches for micro in batch.micros for pair in micro.value]

    data = shoal.ShardedDataset(range(len(LENGTHS)), noisy, lengths=LENGTHS, interleave=8)
    options: dict[str, Any] = {"seed_transforms": True, "collate_fn": list}
    whole = drawn(build(world, data, **options))
    assert len({noise for _, noise in whole}) == SIZE
    first, second = (build(world, data, num_workers=n, **options) for n in (0, 2))
    begun = drawn(first, 11)
    second.load_state_dict(first.state_dict())
    assert begun + drawn(second) == whole


def test_shards_of_a_hub_dataset(world: shoal.World) -> None:
    hub = datasets.Dataset.from_dict({"x": list(range(60))}).to_iterable_dataset(num_shards=6)

    def read(shard: int, start: int) -> Any:
        return hub.shard(6, shard).skip(start)

    def numbers(loader: shoal.Loader, stop: int | None = None) -> list[int]:
        batches = itertools.islice(loader.epochs(2), stop)
        return [x for batch in batches for micro in batch.micros for x in micro.value["x"].tolist()]

    first, second = (build(world, shoal.ShardedDataset(range(6), read, interleave=4)) for _ in range(2))
    begun = numbers(first, 5)
    second.load_state_dict(first.state_dict())
    rest = numbers(second)
    assert sorted((begun + rest)[:60]) == sorted((begun + rest)[60:]) == list(range(60))
    assert begun + rest == numbers(build(world, shoal.ShardedDataset(range(6), read, interleave=4)))
