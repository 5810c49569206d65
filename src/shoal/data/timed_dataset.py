"""Datasets whose items come with the time that it took to make them, in the process that made them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset


def timed(dataset: Dataset[Any]) -> Dataset[tuple[Any, float]]:
    """The same dataset, each item with the seconds that it took.

    A rank with workers sees only how long it waits for them: almost nothing while they keep up, and
    on one rank alone once none of them do, since the other ranks wait for that rank meanwhile.
    """
    if isinstance(dataset, IterableDataset):
        return _TimedIterable(dataset)
    return _TimedItems(dataset)


class _TimedItems(Dataset[tuple[Any, float]]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> tuple[Any, float]:
        begun = time.perf_counter()
        item = self._dataset[index]
        return item, time.perf_counter() - begun


class _TimedIterable(IterableDataset[tuple[Any, float]]):
    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        items = iter(self._dataset)
        while True:
            begun = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            yield item, time.perf_counter() - begun
