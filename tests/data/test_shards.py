"""Shards: each sample once in an epoch, in the same place on any number of ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

import shoal
from helpers.loaders import read
from shoal.data.sampler import RankSampler
from shoal.data.shards import Lanes, ShardSource
from shoal.util.errors import DataError

BATCH = 16
LENGTHS = np.random.default_rng(5).integers(0, 40, 25).tolist()
SIZE = sum(LENGTHS)


class Shards:
    """Shards of numbered samples; knows how often they were opened, and how many samples were read."""

    def __init__(self, lengths: list[int]) -> None:
        self.starts = [0, *itertools.accumulate(lengths)]
        self.opened = self.yielded = 0

    def __call__(self, shard: int, start: int) -> Iterator[int]:
        self.opened += 1
        for number in range(self.starts[shard] + start, self.starts[shard + 1]):
            self.yielded += 1
            yield number


def stream(**options: Any) -> shoal.ShardedDataset[int]:
    given = {"lengths": LENGTHS, "interleave": 8} | options
    return shoal.ShardedDataset(range(len(LENGTHS)), Shards(LENGTHS), **given)


def build(world: shoal.World, data: Any = None, **options: Any) -> shoal.Loader:
    data = stream() if data is None else data
    return shoal.Loader(data, world, **({"batch_size": BATCH, "seed": 3} | options))


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
    assert read(build(world, stream(interleave=1), shuffle=False), 1) == list(range(SIZE))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2), (4, 1), (4, 4)])
def test_each_process_reads_lanes_of_its_own(ranks: int, workers: int) -> None:
    """What all of them read together is hardly more than there is."""
    lengths = [4000] * 16
    reader = Shards(lengths)
    data = shoal.ShardedDataset(range(16), reader, lengths=lengths, interleave=16)
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
    assert reader.yielded <= 64000 * 1.02
    assert reader.opened <= 64


@pytest.mark.processes
def test_a_stream_does_not_see_the_worker_that_reads_it(world: shoal.World) -> None:
    """In a worker, shards of a stream of `datasets` 5.2.0 yield only the samples of this worker."""

    def divided(shard: int, start: int) -> Iterator[int]:
        here = get_worker_info()
        number, step = (0, 1) if here is None else (here.id, here.num_workers)
        yield from range(10 * shard + start + number, 10 * shard + 10, step)

    data = shoal.ShardedDataset(range(4), divided, lengths=[10] * 4)
    assert sorted(read(build(world, data, num_workers=2), epochs=1)) == list(range(40))


def test_a_million_samples_are_sought_not_read(world: shoal.World) -> None:
    reader = Shards([250_000] * 4)
    data = shoal.ShardedDataset(range(4), reader, lengths=[250_000] * 4)
    loader = shoal.Loader(data, world, batch_size=64)
    loader.load_state_dict(loader.state_dict() | {"position": 900_000})
    [batch] = itertools.islice(loader.epochs(1), 1)
    assert len(set(batch.micros[0].value.tolist())) == 64
    assert reader.yielded <= 64


def test_lengths_that_are_not_known_are_counted_once(world: shoal.World) -> None:
    data = stream(lengths=None)
    assert read(build(world, data), 1) == read(build(world), 1)
    assert data.lengths == LENGTHS
    reader = data.read
    assert isinstance(reader, Shards)
    before = reader.yielded
    build(world, data)
    assert reader.yielded == before


@pytest.mark.parametrize(("wrong", "found"), [(-1, "continues after"), (1, "ended before sample")])
def test_a_shard_of_another_length_is_noticed(world: shoal.World, wrong: int, found: str) -> None:
    lengths = [length + wrong if number == 3 else length for number, length in enumerate(LENGTHS)]
    with pytest.raises(DataError, match=found):
        read(build(world, stream(lengths=lengths, interleave=1), shuffle=False), 1)


def test_a_state_of_other_shards_is_refused(world: shoal.World) -> None:
    state = build(world).state_dict()
    swapped = [*LENGTHS[1:], LENGTHS[0]]
    for other in (stream(lengths=swapped), stream(interleave=4), torch.arange(SIZE)):
        with pytest.raises(DataError, match="shards and lanes of checksum"):
            build(world, other).load_state_dict(state)


def test_shards_of_one_length_in_another_order_are_refused(world: shoal.World) -> None:
    def loader(*names: str) -> shoal.Loader:
        paths = [Path("shards") / name for name in names]
        data = shoal.ShardedDataset(paths, lambda _, start: range(start, 5), lengths=[5] * len(names))
        return shoal.Loader(data, world, batch_size=4)

    state = loader("a", "b", "c").state_dict()
    loader("a", "b", "c").check_state(state)
    with pytest.raises(shoal.DataError, match="checksum"):
        loader("b", "a", "c").check_state(state)


def test_what_is_no_stream(world: shoal.World) -> None:
    with pytest.raises(DataError, match="lengths has one number of samples"):
        stream(lengths=[1])
    with pytest.raises(DataError, match="no shards, or interleave below 1"):
        stream(interleave=0)
    with pytest.raises(DataError, match="not at random"):
        build(world, order=shoal.WeightedSampling([1.0] * SIZE))
    with pytest.raises(DataError, match="without samples"):
        build(world, shoal.ShardedDataset([0], lambda shard, start: iter(())))
