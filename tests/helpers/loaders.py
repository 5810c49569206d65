"""What the batches of a Loader contain."""

from __future__ import annotations

from typing import Any

import torch

import shoal


def seen(loader: shoal.Loader, epochs: int = 2, stop: int | None = None) -> list[list[Any]]:
    """The samples of each batch, without those that stand in; leaves the loop after `stop` batches.

    Of samples of several parts, it has the first one.
    """
    found = []
    for batch in loader.epochs(epochs):
        values = [micro.value for micro in batch.micros if micro.weight]
        parts = [next(iter(v.values())) if isinstance(v, dict) else v for v in values]
        parts = [p[0] if isinstance(p, (tuple, list)) and torch.is_tensor(p[0]) else p for p in parts]
        found.append([sample for part in parts for sample in torch.as_tensor(part).tolist()])
        assert len(found[-1]) == batch.size
        if len(found) == stop:
            break
    return found


def read(loader: shoal.Loader, epochs: int = 2, stop: int | None = None) -> list[Any]:
    """The same, of all batches together."""
    return [sample for batch in seen(loader, epochs, stop) for sample in batch]
