from __future__ import annotations

from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import shoal
from helpers.lazy import LazyModule
from shoal.util.errors import DataError

datasets = LazyModule("datasets")

SIZE, BATCH = 11, 4
X = torch.arange(SIZE * 2, dtype=torch.float32).view(SIZE, 2)
Y = torch.arange(SIZE)

Pair = namedtuple("Pair", ["x", "y"])


class Rows(Dataset[tuple[Tensor, int]]):
    """Map-style, one sample at a time."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index], int(Y[index])


class Batched(Rows):
    """Map-style with samples fetched together; its `__getitem__` must not be called."""

    def __init__(self) -> None:
        self.fetched: list[list[int]] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        self.fetched.append(indices)
        return [(X[index], int(Y[index])) for index in indices]


class MadeRows(Rows):
    """Samples of a kind."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __getitem__(self, index: int) -> Any:
        return self._make(x=X[index], y=int(Y[index]))


def hub() -> Any:
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch")


def values(world: shoal.World, dataset: Any, **options: Any) -> list[Any]:
    loader = shoal.Loader(dataset, world, batch_size=BATCH, seed=3, **options)
    return [micro for batch in loader.epochs(1) for micro in batch]


def indices() -> list[Tensor]:
    order = shoal.Permutation(SIZE, seed=3, epoch=0).indices(0, SIZE)
    return list(torch.from_numpy(order).split(BATCH))


@pytest.mark.parametrize(
    "dataset",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X, Y.numpy()),
        TensorDataset(X, Y),
        Rows(),
        MadeRows(Pair),
        list(zip(X, Y, strict=True)),
    ],
    ids=["tensors", "arrays", "both", "TensorDataset", "rows", "namedtuples", "list"],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_pairs_of_every_kind(world: shoal.World, dataset: Any, micro_batches: int) -> None:
    found = values(world, dataset, micro_batches=micro_batches)
    assert all(len(pair) == 2 for pair in found)
    chosen = torch.cat(indices())
    assert torch.equal(torch.cat([pair[0] for pair in found]), X[chosen])
    assert torch.equal(torch.cat([pair[1] for pair in found]), Y[chosen])


@pytest.mark.parametrize(
    "dataset",
    [{"x": X, "y": Y}, {"x": X.numpy(), "y": Y}, UserDict(x=X, y=Y), MadeRows(dict), hub()],
    ids=["tensors", "arrays", "UserDict", "rows", "hub"],
)
def test_mappings_of_every_kind(world: shoal.World, dataset: Any) -> None:
    for batch, chosen in zip(values(world, dataset), indices(), strict=True):
        assert set(batch) == {"x", "y"}
        assert torch.equal(batch["x"], X[chosen])
        assert torch.equal(batch["y"], Y[chosen])


@pytest.mark.parametrize("dataset", [MadeRows(Pair), Pair(X, Y)], ids=["rows", "tensors"])
def test_namedtuples_keep_their_names(world: shoal.World, dataset: Any) -> None:
    for batch, chosen in zip(values(world, dataset), indices(), strict=True):
        assert torch.equal(batch.x, X[chosen])
        assert torch.equal(batch.y, Y[chosen])


def test_samples_are_fetched_together_where_the_dataset_can(world: shoal.World) -> None:
    dataset = Batched()
    values(world, dataset, micro_batches=2)
    assert dataset.fetched == [chosen.tolist() for chosen in indices()]


def test_a_micro_batch_may_change_while_the_backward_of_another_is_to_come(world: shoal.World) -> None:
    """As in a pipeline: autograd takes views for changed where any of them was."""
    loader = shoal.Loader((X, Y), world, batch_size=BATCH, micro_batches=2)
    (first, _), (second, _) = next(loader.epochs(1))
    scale = torch.ones(2, requires_grad=True)
    loss = (first.mul_(2) * scale).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(scale.grad, first.sum(0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dataset", [X, X.numpy(), X.numpy()[::-1]], ids=["tensor", "array", "reversed"]
)
def test_a_single_tensor_or_array_gives_tensors(world: shoal.World, dataset: Any) -> None:
    for batch, chosen in zip(values(world, dataset), indices(), strict=True):
        assert np.array_equal(batch.numpy(), np.asarray(dataset)[chosen.numpy()])


@pytest.mark.parametrize(
    "dataset",
    [(X, Y), (X.numpy(), Y), TensorDataset(X, Y), Rows(), Pair(X, Y), {"x": X, "y": Y}],
    ids=["tensors", "arrays", "TensorDataset", "rows", "namedtuple", "dict"],
)
def test_a_collate_function_gets_samples(world: shoal.World, dataset: Any) -> None:
    for batch, chosen in zip(values(world, dataset, collate_fn=list), indices(), strict=True):
        for sample, index in zip(batch, chosen.tolist(), strict=True):
            x, y = sample.values() if isinstance(sample, dict) else sample
            assert torch.equal(torch.as_tensor(x), X[index])
            assert int(y) == index


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (NoLength(), "lacks __len__ or __getitem__"),
        (iter([1]), "lacks __len__ or __getitem__"),
        ([], "without samples"),
        (torch.empty(0, 3), "without samples"),
        ((X, Y[:3]), r"different numbers of samples: \{0: 11, 1: 3\}"),
        ({"x": X, "y": Y[:3]}, r"different numbers of samples: \{'x': 11, 'y': 3\}"),
        (torch.tensor(1.0), "the first dimension counts samples"),
        ((X, torch.tensor(1.0)), "the first dimension counts samples"),
        ((X, Y.tolist()), "list"),
        ({"x": X, "y": Y.tolist()}, "list"),
        ({"x": "text"}, "str"),
        ({}, "without samples"),
        ((), "without samples"),
    ],
)
def test_what_is_no_dataset(world: shoal.World, dataset: Any, found: str) -> None:
    with pytest.raises(DataError, match=found) as raised:
        shoal.Loader(dataset, world, batch_size=1)
    assert raised.value.fix


def test_a_memmap_is_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12.0))
    with shoal.init() as world:
        loader = shoal.Loader(np.load(tmp_path / "rows.npy", mmap_mode="r"), world, batch_size=4)
        rows = [micro for batch in loader.epochs(1) for micro in batch]
    assert sorted(torch.cat(rows).tolist()) == list(range(12))
    assert not [str(each.message) for each in recwarn]
