"""Tensors and arrays that a dataset holds, and digests of a few of their rows."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DEEPEST = 3


def arrays_in(dataset: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and NumPy arrays among the attributes of a dataset, with their names.

    Tuples and lists are searched, and datasets inside a dataset, such as that of a Subset.
    """
    if isinstance(dataset, Tensor):
        yield name, dataset
    elif isinstance(dataset, np.ndarray) and dataset.dtype.kind in "biufc":
        yield name, _bytes(dataset)
    elif depth < _DEEPEST:
        if isinstance(dataset, tuple | list):
            inside: Iterable[tuple[str, Any]] = (
                (f"{name}[{n}]", e) for n, e in enumerate(dataset[:16])
            )
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__dict__"):
            inside = ((f"{name}.{key}".lstrip("."), value) for key, value in vars(dataset).items())
        else:
            return
        for key, value in inside:
            yield from arrays_in(value, key, depth + 1)


def _bytes(array: np.ndarray) -> Tensor:
    """Return the bytes of an array, which may be read-only, such as a memory-mapped file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of dtypes, shapes, and the first, the middle and the last row."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        rows = tensor if tensor.ndim else tensor[None]
        for row in sorted({0, len(rows) // 2, len(rows) - 1}) if len(rows) else ():
            flat = rows[row : row + 1].detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]
