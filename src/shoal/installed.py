"""What is installed, by what its metadata say: nothing is imported for it."""

from __future__ import annotations

import platform
from importlib import metadata


def packages() -> dict[str, str]:
    """The version of each installed package, by name."""
    return {
        found.metadata["Name"]: found.version
        for found in metadata.distributions()
        if found.metadata["Name"]
    }


def versions() -> dict[str, str]:
    """The versions of what trains: Python, torch, NumPy and Shoal."""
    names = ("torch", "numpy", "shoal")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}
