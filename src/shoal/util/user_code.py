"""Distinction between the lines of user code in a stack and those of libraries."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path


@functools.cache  # called for each frame of a stack, at each collective of the first steps
def is_library(filename: str) -> bool:
    """Return whether code of this file belongs to Python, an installed package or Shoal; `<string>`
    does too.
    """
    path = Path(filename)
    return (
        filename.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or path.is_relative_to(sysconfig.get_path("stdlib"))
        or path.is_relative_to(Path(__file__).parents[1])
    )
