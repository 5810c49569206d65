"""The installed packages, by their metadata, without imports; and packages that can't be imported."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import traceback
from contextlib import suppress
from importlib import metadata

from shoal.util.errors import LaunchError
from shoal.util.python import this_python


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


_LIBRARY = re.compile(r"\S+\.so[.\d]*: .+")
"""The message of the dynamic linker."""
_NEVER = {"", "shoal", "__main__", *sys.stdlib_module_names}
"""Modules that are in no package that could be installed."""


def missing_package(error: BaseException) -> LaunchError | None:
    """Return what to install where, if a package or a library of one can't be imported; else None."""
    library = _LIBRARY.search(str(error))
    module = (error.name if isinstance(error, ImportError) else None) or ""
    if library and not module:
        running = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
        module = next((name for name in reversed([*running]) if _root(name) not in _NEVER), "")
    package = _root(module)
    if package in _NEVER:
        return None
    python = this_python()
    found = f"{python} can't import {package}, which Shoal needs: {library[0] if library else error}"
    again = " --force-reinstall" if library else ""
    fix = f"{shlex.quote(python)} -m pip install{again} {shlex.quote(_requirement(package))}"
    if library:
        fix += f"; or load the module of your cluster with {library[0].partition(':')[0]}"
    return LaunchError(given=shlex.join(["shoal", *sys.argv[1:]]), found=found, fix=fix)


def _root(module: str) -> str:
    return module.partition(".")[0]


def _requirement(package: str) -> str:
    """Return the name and the versions of a package that Shoal requires, or else its name."""
    with suppress(metadata.PackageNotFoundError):
        for each in metadata.requires("shoal") or []:
            if re.split(r"[^\w.-]", each)[0].lower() == package.lower() and "extra ==" not in each:
                return each
    return package
