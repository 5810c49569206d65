"""Loader(partners=n): each sample comes with others of its global batch, as `roll` gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

import shoal
from shoal.data.iterable_dataset import StreamReader, StreamSource
from shoal.data.sampler import LocalBatch, RankSampler
from shoal.tools.verify.loaders import consumed_samples
from shoal.util.errors import DataError, StepError

SIZE, BATCH = 21, 8  # the last batch of an epoch has 5 samples, fewer than 3 ranks x 3 micro-batches


class Augmented(Dataset[Any]):
    """Counts how often each sample is taken."""

    def __init__(self) -> None:
        self.taken: Counter[int] = Counter()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> Tensor:
        assert rng is not None
        self.taken[index] += 1
        return index + torch.tensor(rng.random() / 2, dtype=torch.float64)


class Flow(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(SIZE, dtype=torch.float64)


def shards() -> shoal.ShardedDataset[Any]:
    parts = torch.arange(SIZE, dtype=torch.float64).split(4)
    return shoal.ShardedDataset(
        parts, lambda part, start: part[start:], lengths=[len(p) for p in parts]
    )


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(SIZE, dtype=torch.float64),
    "map": Augmented,
    "list": lambda: list(torch.arange(SIZE, dtype=torch.float64)),
    "shards": shards,
    "iterable": Flow,
}


def local_batches(
    loader: shoal.Loader, ranks: int, rank: int, micro_batches: int, **more: Any
) -> Iterator[tuple[LocalBatch, list[Any]]]:
    """The local batches of one rank of several in the first two epochs, with their values."""
    feed: Any = loader.feed
    options = {"ranks": ranks, "rank": rank, "micro_batches": micro_batches, **more}
    if isinstance(feed, StreamSource):
        yield from StreamReader(feed._dataset, replace(feed.cutting, **options), 0, 0, 0, 2)
        return
    sampler: RankSampler = replace(feed.sampler, **options)
    for [share] in sampler.shares(0, 2 * SIZE, 1):
        yield share, feed.source[[share]][0]


def rows(
    loader: shoal.Loader, ranks: int = 1, micro_batches: int = 1, **more: Any
) -> dict[int, list[float]]:
    """The sample and its partners at each position in training."""
    found: dict[int, list[float]] = {}
    for rank in range(ranks):
        for share, values in local_batches(loader, ranks, rank, micro_batches, **more):
            for cell, value in zip(share.cells, values, strict=True):
                lines = torch.stack(value, dim=1).tolist()
                assert len(lines) == cell.stop - cell.start
                if cell.weight:
                    found.update(enumerate(lines, share.first + cell.start))
    return found


BUDGET = shoal.TokenBudget([1] * SIZE, BATCH, max_samples=BATCH)


@pytest.mark.parametrize(
    ("kind", "batch_size"), [*((kind, BATCH) for kind in KINDS), ("tensor", BUDGET), ("map", BUDGET)]
)
def test_any_split_has_the_rolled_samples_of_the_global_batch(
    world: shoal.World, kind: str, batch_size: Any
) -> None:
    loader = shoal.Loader(KINDS[kind](), world, batch_size=batch_size, partners=2)
    found = rows(loader)
    samples = torch.tensor([found[place][0] for place in range(2 * SIZE)], dtype=torch.float64)
    assert sorted(samples[:SIZE].long().tolist()) == list(range(SIZE))
    rolled = [
        torch.stack([batch, batch.roll(1), batch.roll(2)], dim=1)
        for epoch in samples.split(SIZE)
        for batch in epoch.split(BATCH)
    ]
    assert [found[place] for place in range(2 * SIZE)] == torch.cat(rolled).tolist()
    for ranks, micro_batches in ((1, 3), (2, 1), (3, 3), (5, 2)):
        assert rows(loader, ranks, micro_batches) == found
        assert rows(loader, ranks, micro_batches, unit=3) == found
    if kind != "iterable":
        assert rows(loader, 2, 2, proportions=(6, 2)) == found


@pytest.mark.parametrize("kind", ["tensor", "map", "iterable"])
def test_workers_change_nothing(world: shoal.World, kind: str) -> None:
    def values(workers: int) -> list[Any]:
        loader = shoal.Loader(
            KINDS[kind](), world, batch_size=BATCH, micro_batches=2, partners=1, num_workers=workers
        )
        return [[part.tolist() for part in micro] for batch in loader.epochs(2) for micro in batch]

    assert values(0) == values(1)


@pytest.mark.parametrize(("ranks", "more"), [(1, 0), (2, 1), (4, 1)])
def test_a_rank_takes_no_sample_twice(world: shoal.World, ranks: int, more: int) -> None:
    data = Augmented()
    loader = shoal.Loader(data, world, batch_size=BATCH, partners=1)
    for share, _ in local_batches(loader, ranks, ranks - 1, 1):
        if share.size == BATCH:
            assert sum(data.taken.values()) == len(share.indices) == BATCH // ranks + more
            assert set(data.taken.values()) == {1}
        data.taken.clear()


def test_seeded_transforms_are_those_of_the_partner(world: shoal.World) -> None:
    class Drawing(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand((), dtype=torch.float64)

    loader = shoal.Loader(Drawing(), world, batch_size=BATCH, partners=1, seed_transforms=True)
    assert rows(loader, 3, 2) == rows(loader)


def test_a_collate_function_may_change_its_samples(world: shoal.World) -> None:
    def popped(samples: list[Any]) -> Tensor:
        return torch.tensor([sample.pop("x") for sample in samples])

    data = [{"x": float(number)} for number in range(SIZE)]

    class Copies(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Any:
            return dict(data[index])

    loader = shoal.Loader(Copies(), world, batch_size=BATCH, partners=1, collate_fn=popped)
    for batch in loader.epochs(1):
        for own, partners in batch:
            assert torch.equal(partners, own.roll(1))


def test_partners_have_memory_of_their_own(world: shoal.World) -> None:
    loader = shoal.Loader(torch.arange(SIZE), world, batch_size=BATCH, partners=1)
    for batch in loader.epochs(1):
        for own, partners in batch:
            expected = own.roll(1)
            own.zero_()
            assert torch.equal(partners, expected)


def test_a_batch_of_one_sample_is_its_own_partner(world: shoal.World) -> None:
    loader = shoal.Loader(torch.arange(5), world, batch_size=4, partners=1, shuffle=False)
    last = [micro for batch in loader.epochs(1) for micro in batch][-1]
    assert [part.tolist() for part in last] == [[4], [4]]


def test_the_records_of_verify_leave_partners_out(world: shoal.World) -> None:
    loader = shoal.Loader(torch.arange(SIZE), world, batch_size=BATCH, partners=2, shuffle=False)
    feed: Any = loader.feed
    for share, _ in local_batches(loader, 2, 1, 2):
        _, indices, _ = consumed_samples(feed, share)
        first = share.first % SIZE
        assert indices == tuple(range(first + share.size // 2, first + share.size))


@pytest.mark.parametrize("partners", [-1, BATCH, 1.0, True, None])
def test_a_wrong_number_is_named(world: shoal.World, partners: Any) -> None:
    with pytest.raises(DataError, match="partners is an integer from 0 to 7"):
        shoal.Loader(torch.arange(SIZE), world, batch_size=BATCH, partners=partners)


def test_numbers_of_the_batch_do_not_depend_on_the_samples() -> None:
    one, other = (shoal.Noise(3, first, 2, batch_first=8) for first in (8, 12))
    for own, same in ((one, other), (one.named("mixup"), other.named("mixup"))):
        drawn = own.batch.normal(3)
        assert drawn.shape == (1, 3)
        assert torch.equal(drawn, same.batch.normal(3))
    assert torch.equal(one.batch.normal(), other.batch.normal())  # later draws continue the stream
    assert not torch.equal(one.batch.normal(), one.named("mixup").batch.normal())
    assert not torch.equal(one.batch.normal(), one.normal()[:1])


def test_numbers_of_the_beta_distribution() -> None:
    drawn = shoal.Noise(0, 0, 2000).beta(0.5, 1.5, 2, dtype=torch.float64)
    assert drawn.shape == (2000, 2)
    assert drawn.mean().item() == pytest.approx(0.25, abs=0.02)  # alpha / (alpha + beta)
    assert drawn.var().item() == pytest.approx(0.0625, abs=0.01)
    for wrong in (0, -1.0, "a", float("nan")):
        with pytest.raises(StepError, match="alpha is a number above 0"):
            shoal.Noise(0, 0, 2).beta(wrong, 1.0)  # type: ignore[arg-type]


def test_weights_of_any_shape_are_the_same() -> None:
    """`inputs` may draw the weights in the shape of images and `loss` in that of labels."""
    source = shoal.Noise(0, 0, 3).named("mixup")
    assert torch.equal(
        source.beta(0.2, 0.2, 1, 1).flatten(), shoal.Noise(0, 0, 3).named("mixup").beta(0.2, 0.2)
    )
