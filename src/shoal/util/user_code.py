"""Which lines of a stack are the user's own, and which a library's."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path


@functools.cache  # asked for each frame of a stack, at each collective of the first steps
def is_library(filename: str) -> bool:
    """Whether code of this file is of Python, an installed package or Shoal; `<string>` is too."""
    path = Path(filename)
    return (
        filename.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or path.is_relative_to(sysconfig.get_path("stdlib"))
        or path.is_relative_to(Path(__file__).parents[1])
    )
