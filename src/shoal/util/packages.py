"""The installed packages, by their metadata, without imports."""

from __future__ import annotations

import platform
import re
from importlib import metadata


def packages() -> dict[str, str]:
    """Return the version of each package that Python would import, by name.

    If `sys.path` has a package twice, the first one counts, as for `import`. Spellings of one name,
    such as `ruamel.yaml` and `ruamel_yaml`, are one package (PEP 503).
    """
    first: dict[str, tuple[str, str]] = {}
    for found in metadata.distributions():
        name = found.metadata["Name"]
        if name:
            first.setdefault(re.sub(r"[-_.]+", "-", name).lower(), (name, found.version))
    return dict(first.values())


def versions() -> dict[str, str]:
    """Return the versions that matter for training: Python, torch, NumPy and Shoal."""
    names = ("torch", "numpy", "shoal")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}
