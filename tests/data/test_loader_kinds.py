"""Every kind of data, order and batch: workers change nothing, and a Loader resumes anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, SequentialSampler

import shoal
from helpers.lazy import LazyModule
from helpers.loaders import read, seen

datasets = LazyModule("datasets")

SIZE, BATCH = 23, 4
DATA = torch.arange(SIZE)
LENGTHS = [3, 0, 1, 4, 2, 0, 5, 1, 3, 4]
STARTS = np.cumsum([0, *LENGTHS]).tolist()


class Rows(Dataset[Any]):
    """One sample at a time."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index


class Asking(Rows):
    """Asks for a generator of each sample."""

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> Tensor:
        assert rng is not None
        return torch.tensor([index, rng.random(), rng.random()], dtype=torch.float64)


class AskingTogether(Asking):
    def __getitems__(self, indices: list[int], rng: list[np.random.Generator]) -> list[Tensor]:
        one = super().__getitem__
        return [one(index, generator) for index, generator in zip(indices, rng, strict=True)]


class Drawing(Rows):
    """Draws from the generators that everyone shares."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([index, *drawn], dtype=torch.float64)


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


class Flowing(IterableDataset[Any]):
    """As many samples as there are, and one more in each later epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from range(1000 * self.epoch, 1000 * self.epoch + SIZE + self.epoch)


class FlowingNoise(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(SIZE):
            yield torch.tensor([number, random.random()], dtype=torch.float64)


def shard(number: int, start: int) -> Iterator[int]:
    yield from range(STARTS[number] + start, STARTS[number + 1])


def noisy_shard(number: int, start: int) -> Iterator[tuple[int, float]]:
    return ((sample, random.random()) for sample in shard(number, start))


def shards(read: Callable[[int, int], Any]) -> Any:
    return shoal.ShardedDataset(range(len(LENGTHS)), read, lengths=LENGTHS, interleave=4)


def hub() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(SIZE))}).to_iterable_dataset(num_shards=4)


SHUFFLED: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": lambda: {"dataset": (DATA, DATA * 2.0)},
    "rows": lambda: {"dataset": Rows()},
    "budget": lambda: {"batch_size": shoal.TokenBudget([1 + (7 * n) % 40 for n in range(SIZE)], 60)},
    "shards": lambda: {"dataset": shards(shard)},
    "shuffled hub stream": lambda: {"dataset": hub().shuffle(seed=1, buffer_size=7)},
}
DRAWING: dict[str, Callable[[], dict[str, Any]]] = {
    "rng": lambda: {"dataset": Asking()},
    "rng together": lambda: {"dataset": AskingTogether()},
    "augmented": lambda: {"dataset": Drawing(), "seed_transforms": True},
    "noisy shards": lambda: {
        "dataset": shards(noisy_shard), "seed_transforms": True, "collate_fn": list
    },
    "noisy stream": lambda: {"dataset": FlowingNoise(), "seed_transforms": True},
}  # fmt: skip
KINDS = {
    **SHUFFLED,
    **DRAWING,
    "weighted": lambda: {"order": shoal.WeightedSampling(range(SIZE), size=31)},
    "by epoch": lambda: {"order": ByEpoch()},
    "sequential": lambda: {"order": SequentialSampler(DATA)},
    "hub stream": lambda: {"dataset": hub()},
    "stream": lambda: {"dataset": Flowing()},
}


def build(world: shoal.World, kind: str, **options: Any) -> shoal.Loader:
    usual: dict[str, Any] = {"dataset": DATA, "batch_size": BATCH, "seed": 3}
    return shoal.Loader(world=world, **(usual | KINDS[kind]() | options))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_micro_batches_change_nothing(world: shoal.World, kind: str) -> None:
    """FAILURES 24: each (epoch, sample) has its stream, whichever worker loads it."""
    alone = seen(build(world, kind))
    for options in ({"num_workers": 2, "prefetch_factor": 3}, {"micro_batches": 3}):
        assert seen(build(world, kind, **options)) == alone, options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_workers", "stops"), [(0, (1, 6, 8, 12)), (2, (8,))])
def test_a_loader_goes_on_where_it_was_left(
    world: shoal.World, kind: str, num_workers: int, stops: tuple[int, ...]
) -> None:
    """The same one, and one that resumes from its state."""
    whole = seen(build(world, kind), 3)
    for stop in stops:
        first, second = (build(world, kind, num_workers=num_workers) for _ in range(2))
        begun = seen(first, 3, stop)
        second.load_state_dict(first.state_dict())
        assert second.epoch == first.epoch
        assert begun + seen(second, 3) == whole, stop
        assert begun + seen(first, 3) == whole, stop


def test_shards_of_a_hub_dataset_resume(world: shoal.World) -> None:
    def data() -> Any:
        return shoal.ShardedDataset(range(4), lambda number, start: hub().shard(4, number).skip(start))

    first, second = (build(world, "tensors", dataset=data()) for _ in range(2))
    begun = read(first, stop=8)
    second.load_state_dict(first.state_dict())
    found = begun + read(second)
    assert sorted(found[:SIZE]) == sorted(found[SIZE:]) == list(range(SIZE))
    assert found == read(build(world, "tensors", dataset=data()))


@pytest.mark.parametrize("kind", ["tensors", "shards"])
def test_a_resumed_loader_may_cut_other_batches(world: shoal.World, kind: str) -> None:
    first, second = build(world, kind), build(world, kind, batch_size=7)
    begun = read(first, stop=3)
    second.load_state_dict(first.state_dict())
    assert begun + read(second) == read(build(world, kind))


@pytest.mark.parametrize("kind", SHUFFLED)
def test_every_sample_once_in_each_epoch_and_in_another_order(world: shoal.World, kind: str) -> None:
    found = read(build(world, kind), 3)
    epochs = [found[start : start + SIZE] for start in (0, SIZE, 2 * SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("kind", DRAWING)
def test_no_sample_draws_what_another_or_another_epoch_draws(world: shoal.World, kind: str) -> None:
    """FAILURES 24: nobody repeats anybody."""
    draws = [draw for _, *row in read(build(world, kind)) for draw in row]
    assert len(set(draws)) == len(draws) >= 2 * SIZE
