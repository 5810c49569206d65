"""Random numbers of samples: the same for (seed, epoch, position), whoever loads them."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

import shoal
from helpers.loaders import read
from shoal.data.map_dataset import MapStyleDataset
from shoal.data.orders import Shuffled
from shoal.data.sampler import RankSampler
from shoal.util.errors import DataError

SIZE, BATCH, EPOCHS = 23, 4, 2


class Asking(Dataset[Any]):
    """Asks for a generator of each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> Tensor:
        assert rng is not None
        return torch.tensor([index, rng.random()], dtype=torch.float64)


class Drawing(Dataset[Any]):
    """Draws from the generators that everyone shares, or from the one of `kind`."""

    def __init__(self, kind: str = "all") -> None:
        self._kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        ways = {
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "python": random.random,
        }
        drawn = [ways[each]() for each in ways if self._kind in (each, "all")]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def build(world: shoal.World, dataset: Any, **options: Any) -> shoal.Loader:
    return shoal.Loader(dataset, world, **({"batch_size": BATCH, "seed": 3} | options))


@pytest.mark.parametrize(("dataset", "augmented"), [(Asking(), False), (Drawing(), True)])
def test_ranks_change_nothing(world: shoal.World, dataset: Any, augmented: bool) -> None:
    """FAILURES 24: nor which rank."""
    alone = read(build(world, dataset, seed_transforms=augmented), EPOCHS)
    served = MapStyleDataset(dataset, torch.stack, 3, seed_transforms=augmented)
    for ranks in (2, 3):
        found = []
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
                if share.cells[0].weight:
                    found += served[[share]][0][0].tolist()
        assert sorted(found) == sorted(alone)


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
    read(build(world, Drawing(), seed_transforms=True))
    # torch's own DataLoader takes a base seed from its generator, which is the Loader's here.
    assert three() == expected


def test_another_seed_draws_otherwise(world: shoal.World) -> None:
    one, other = (read(build(world, Asking(), seed=seed)) for seed in (3, 4))
    assert {draw for _, draw in one}.isdisjoint(draw for _, draw in other)


def test_a_wrapper_that_hides_rng_is_named(world: shoal.World) -> None:
    hidden = Subset(Subset(Asking(), range(9)), range(5))
    with pytest.raises(DataError, match="Subset does not pass on"):
        build(world, hidden)


def test_tensors_can_not_be_augmented(world: shoal.World) -> None:
    with pytest.raises(DataError, match="draw no random numbers"):
        build(world, torch.arange(SIZE), seed_transforms=True)


def warned(world: shoal.World, kind: str, **options: Any) -> list[str]:
    data = build(world, Drawing(kind), **options)
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


def masked(samples: list[Tensor]) -> Tensor:
    """Drops elements of a batch, as language modeling with masks does."""
    batch = torch.stack(samples)
    return batch * (torch.rand(batch.shape) < 0.9)


@pytest.mark.parametrize("seed_transforms", [False, True])
def test_draws_of_the_collate_function_are_told_once(world: shoal.World, seed_transforms: bool) -> None:
    (text,) = warned(world, "none", seed_transforms=seed_transforms, collate_fn=masked)
    assert text.startswith("collate_fn draws random numbers")


def test_of_several_workers_one_tells_it(world: shoal.World, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: os.write(2, str(message).encode())  # type: ignore[assignment]
        read(build(world, Drawing("torch"), num_workers=2))
    assert capfd.readouterr().err.count("the dataset draws random numbers") == 1
