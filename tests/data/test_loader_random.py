"""Random numbers of samples: the same for (seed, epoch, position), whoever loads them."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

import shoal
from shoal.data.map_dataset import MapStyleDataset
from shoal.data.orders import Shuffled
from shoal.data.sampler import RankSampler
from shoal.util.errors import DataError

SIZE, BATCH, EPOCHS = 23, 4, 2

Drawn = dict[tuple[int, int], tuple[float, ...]]


class Asking(Dataset[Any]):
    """Asks for a generator of each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> Tensor:
        assert rng is not None
        return torch.tensor([index, rng.random(), rng.random()], dtype=torch.float64)


class AskingTogether(Asking):
    def __getitems__(self, indices: list[int], rng: list[np.random.Generator]) -> list[Tensor]:
        one = super().__getitem__
        return [one(index, generator) for index, generator in zip(indices, rng, strict=True)]


class Drawing(Dataset[Any]):
    """Draws from the generators that everyone shares."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), np.random.rand(), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([index, *drawn], dtype=torch.float64)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Asking(), {}),
    (AskingTogether(), {}),
    (Drawing(), {"seed_transforms": True}),
]
kinds = pytest.mark.parametrize(("dataset", "options"), KINDS, ids=["rng", "together", "augment"])


def build(world: shoal.World, dataset: Any, **options: Any) -> shoal.Loader:
    return shoal.Loader(dataset, world, batch_size=BATCH, seed=3, **options)


def drawn(loader: shoal.Loader, stop: int | None = None) -> Drawn:
    """What each sample drew, by (epoch, index)."""
    found: Drawn = {}
    for number, batch in enumerate(loader.epochs(EPOCHS), 1):
        for micro in batch.micros:
            for index, *numbers in micro.value.tolist():
                found[batch.first // SIZE, int(index)] = tuple(numbers)
        if number == stop:
            break
    return found


@kinds
@pytest.mark.parametrize("other", [{"num_workers": 2}, {"micro_batches": 3}])
def test_workers_and_micro_batches_change_nothing(
    world: shoal.World, dataset: Any, options: dict[str, Any], other: dict[str, Any]
) -> None:
    """FAILURES 24: each (epoch, sample) has its stream, whichever worker loads it."""
    alone = drawn(build(world, dataset, **options))
    assert len(alone) == SIZE * EPOCHS
    assert drawn(build(world, dataset, **options, **other)) == alone


@kinds
def test_no_sample_draws_what_another_or_another_epoch_draws(
    world: shoal.World, dataset: Any, options: dict[str, Any]
) -> None:
    """FAILURES 24: nobody repeats anybody."""
    numbers = [number for row in drawn(build(world, dataset, **options)).values() for number in row]
    assert len(set(numbers)) == len(numbers)


@kinds
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_draws_the_same(
    world: shoal.World, dataset: Any, options: dict[str, Any], num_workers: int
) -> None:
    first, second = (build(world, dataset, num_workers=num_workers, **options) for _ in range(2))
    begun = drawn(first, stop=8)
    second.load_state_dict(first.state_dict())
    assert begun | drawn(second) == drawn(build(world, dataset, **options))


@kinds
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_change_nothing(
    world: shoal.World, dataset: Any, options: dict[str, Any], ranks: int
) -> None:
    """FAILURES 24: nor which rank."""
    alone = drawn(build(world, dataset, **options))
    served = MapStyleDataset(dataset, torch.stack, 3, seed_transforms=bool(options))
    for rank in range(ranks):
        sampler = RankSampler(
            order=Shuffled(SIZE, shuffle=True),
            batch_size=BATCH,
            ranks=ranks,
            rank=rank,
            micro_batches=1,
            seed=3,
            drop_last=False,
        )
        for [share] in sampler.shares(0, SIZE * EPOCHS, 1):
            for index, *numbers in served[[share]][0][0].tolist():
                assert alone[share.first // SIZE, int(index)] == tuple(numbers)


def test_the_main_process_keeps_its_own_generators(world: shoal.World) -> None:
    def three() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = three()
    seed()
    drawn(build(world, Drawing(), seed_transforms=True))
    # torch's own DataLoader takes a base seed from its generator, which is the Loader's here.
    assert three() == expected


def test_another_seed_draws_otherwise(world: shoal.World) -> None:
    one = drawn(build(world, Asking()))
    other = drawn(shoal.Loader(Asking(), world, batch_size=BATCH, seed=4))
    assert set(one.values()).isdisjoint(other.values())


def test_a_wrapper_that_hides_rng_is_named(world: shoal.World) -> None:
    hidden = Subset(Subset(Asking(), range(9)), range(5))
    with pytest.raises(DataError, match="Subset does not pass on"):
        build(world, hidden)


def test_tensors_can_not_be_augmented(world: shoal.World) -> None:
    with pytest.raises(DataError, match="draw no random numbers"):
        build(world, torch.arange(SIZE), seed_transforms=True)


class Global(Dataset[Any]):
    """Draws as most datasets do."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> float:
        drawn = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "none": float}
        return index + {**drawn, "python": random.random}[self._kind]()


def warned(world: shoal.World, kind: str, *, seed_transforms: bool = False) -> list[str]:
    data = shoal.Loader(Global(kind), world, batch_size=BATCH, seed_transforms=seed_transforms)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(data.epochs(2))) == 2 * len(data)
    return [str(one.message) for one in caught if "draws random numbers" in str(one.message)]


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_draws_that_are_not_the_samples_are_told_once(world: shoal.World, kind: str) -> None:
    (text,) = warned(world, kind)
    assert "rng" in text
    assert "seed_transforms=True" in text
    assert warned(world, kind, seed_transforms=True) == []
    assert warned(world, "none") == []


SCRIPT = """
import torch, shoal

class Global:
    def __len__(self):
        return 23
    def __getitem__(self, index):
        return index + float(torch.rand(()))

with shoal.init() as world:
    for _ in shoal.Loader(Global(), world, batch_size=4, num_workers=2).epochs(2):
        pass
"""


@pytest.mark.full
def test_of_several_workers_one_tells_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stderr.count("the dataset draws random numbers") == 1
