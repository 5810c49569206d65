"""Files of a model's tensors, which are complete when they appear."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a file next to `path` to write to; rename it to `path` after the block, or remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save_pickled(tensors: dict[str, Any], path: Path) -> None:
    """Write a `.pt` file; raises OSError if it can't be written."""
    try:
        with path.open("wb") as file:
            torch.save(tensors, file)
    except RuntimeError as error:
        # For a full disk, torch only reports an unexpected position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
