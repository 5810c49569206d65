"""Datasets that measure the time of each item, in the process that makes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from shoal.util.clock import CLOCK


def timed(dataset: Dataset[Any]) -> Dataset[tuple[Any, float]]:
    """Return the same dataset, each item with the seconds that making it took.

    A rank with workers measures only its wait for them: almost nothing while they keep up. If all
    ranks' workers are too slow, only one rank waits for its workers, and the others wait for that rank.
    """
    if isinstance(dataset, IterableDataset):
        return _TimedIterable(dataset)
    return _TimedItems(dataset)


class _TimedItems(Dataset[tuple[Any, float]]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> tuple[Any, float]:
        begun = CLOCK.now()
        item = self._dataset[index]
        return item, CLOCK.now() - begun


class _TimedIterable(IterableDataset[tuple[Any, float]]):
    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        items = iter(self._dataset)
        while True:
            begun = CLOCK.now()
            try:
                item = next(items)
            except StopIteration:
                return
            yield item, CLOCK.now() - begun
