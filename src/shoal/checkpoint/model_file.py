"""Files of a model's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


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
