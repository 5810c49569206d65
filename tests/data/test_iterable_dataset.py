"""Datasets that can only be iterated: read whole by each rank, of a length that nobody knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import shoal
from helpers.lazy import LazyModule
from helpers.loaders import read, seen
from shoal.data.iterable_dataset import BatchSplit, StreamReader
from shoal.util.errors import DataError

datasets = LazyModule("datasets")
distributed_datasets = LazyModule("datasets.distributed")

BATCH = 4


class Counting(IterableDataset[int]):
    """As many samples as it says, and as many more as the epoch."""

    def __init__(self, size: int = 22) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(1000 * self.epoch, 1000 * self.epoch + self.size + self.epoch)


EPOCHS = [list(range(22)), list(range(1000, 1023)), list(range(2000, 2024))]


def build(world: shoal.World, data: Any = None, **options: Any) -> shoal.Loader:
    data = Counting() if data is None else data
    return shoal.Loader(data, world, **({"batch_size": BATCH, "seed": 3} | options))


def test_each_epoch_to_its_own_end(world: shoal.World) -> None:
    loader = build(world)
    before = loader.epoch_size
    found = seen(loader, 3)
    assert [index for batch in found for index in batch] == [*itertools.chain(*EPOCHS)]
    assert [len(batch) for batch in found] == [4] * 5 + [2] + [4] * 5 + [3] + [4] * 6
    assert (before, loader.epoch_size) == (None, 24)
    assert (loader.epoch, loader.position) == (3, 69)


def test_short_batches_may_be_dropped(world: shoal.World) -> None:
    found = seen(build(world, drop_last=True), 3)
    assert [len(batch) for batch in found] == [4] * 16
    with pytest.raises(DataError, match="not enough for a batch"):
        seen(build(world, Counting(3), drop_last=True), 1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_end_in_the_same_step_and_share_every_sample(ranks: int) -> None:
    ends, real = [], []
    for rank in range(ranks):
        cutting = BatchSplit(
            batch_size=BATCH,
            ranks=ranks,
            rank=rank,
            micro_batches=1,
            drop_last=False,
            collate=list,
            seed=0,
            seed_transforms=False,
        )
        shares = list(StreamReader(Counting(), cutting, 0, 0, 0, 2))
        ends.append([(share.first, share.size, share.ends) for share, _ in shares])
        for share, values in shares:
            cells = zip(share.cells, values, strict=True)
            real += [sample for cell, value in cells if cell.weight for sample in value]
    assert all(each == ends[0] for each in ends)
    assert sorted(real) == EPOCHS[0] + EPOCHS[1]


def test_a_hub_stream_that_was_divided_already(world: shoal.World) -> None:
    stream = datasets.Dataset.from_dict({"x": list(range(23))}).to_iterable_dataset(num_shards=4)
    divided = distributed_datasets.split_dataset_by_node(stream, rank=0, world_size=2)
    with pytest.raises(DataError, match="split that part again"):
        build(world, divided)


class Halved(IterableDataset[int]):
    """Divides itself among workers, as torch's documentation has it."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(0 if worker is None else worker.id, 22, 1 if worker is None else 2)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_dataset_that_divides_itself_among_workers(world: shoal.World, num_workers: int) -> None:
    assert read(build(world, Halved(), num_workers=num_workers), 1) == list(range(22))


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.samples = iter(range(5))

    def __iter__(self) -> Iterator[int]:
        return self.samples


def test_what_begins_only_once_is_named(world: shoal.World) -> None:
    with pytest.raises(DataError, match="start from the beginning"):
        seen(build(world, Once()), 2)


def test_a_dataset_that_shrank_is_noticed(world: shoal.World) -> None:
    first = build(world)
    seen(first, 1, 4)
    second = build(world, Counting(10))
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="the dataset now ends after 10"):
        seen(second, 1)


def test_what_needs_positions_is_refused(world: shoal.World) -> None:
    positions: list[dict[str, Any]] = [
        {"order": shoal.WeightedSampling([1.0])},
        {"batch_size": shoal.TokenBudget([1], 5)},
    ]
    for options in positions:
        with pytest.raises(DataError, match="an IterableDataset has no random access"):
            build(world, **options)


def test_its_state_is_not_that_of_another_kind(world: shoal.World) -> None:
    with pytest.raises(DataError, match="a dataset that is iterated"):
        build(world, torch.arange(22)).load_state_dict(build(world).state_dict())
    with pytest.raises(DataError, match="read at positions"):
        build(world).load_state_dict(build(world, torch.arange(22)).state_dict())
