"""Directories listed in reverse: scripts must not depend on the file system's order."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any


def reverse_listings() -> None:
    """Reverse the result of `os.listdir`, on which `Path.iterdir` and `shutil` are built."""
    original = os.listdir

    @wraps(original)
    def listdir(*arguments: Any) -> Any:
        return original(*arguments)[::-1]

    os.listdir = listdir  # type: ignore[assignment]
