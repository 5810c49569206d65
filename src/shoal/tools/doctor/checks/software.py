"""Check that Python, torch, packages and source are the same on all ranks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from shoal.tools.doctor.findings import (
    CheckResult,
    RankFacts,
    describe_difference,
    failure,
    ok,
    same_on_all,
)
from shoal.util.differences import RankDifference, differences
from shoal.util.packages import packages

CORE = ("torch", "numpy", "shoal")
"""Packages with a separate line in the report."""

MOST_SOURCES = 2000
_NAMED = 5


class Software(TypedDict):
    """Versions and digests, by name."""

    python: str
    packages: dict[str, str]


class Sources(TypedDict):
    """The digest of each Python file in a folder and below, by its path in the folder."""

    folder: str
    files: dict[str, str]


def describe_software() -> Software:
    """Return the packages that are installed for this Python."""
    return Software(python=platform.python_version(), packages=packages())


def describe_sources(folder: Path) -> Sources:
    """Return digests of the Python files in `folder` and below, except hidden ones and environments."""
    if not folder.is_dir():
        raise NotADirectoryError(folder)
    files: dict[str, str] = {}
    for path in _sources(folder.absolute()):
        if len(files) == MOST_SOURCES:
            break
        files[str(path.relative_to(folder.absolute()))] = _digest(path)
    return Sources(folder=str(folder.absolute()), files=files)


def _sources(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        own = [name for name in folders if not name.startswith((".", "__pycache__", "node_modules"))]
        # Sorted, so that all ranks take the same ones if there are too many.
        folders[:] = sorted(name for name in own if not (Path(here) / name / "pyvenv.cfg").exists())
        yield from (Path(here) / name for name in sorted(names) if name.endswith(".py"))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return str(error)


def check_software(ranks: Sequence[RankFacts[Software]]) -> Iterator[CheckResult]:
    """Yield a line for Python, one for each package of training, one for all others."""
    found = ranks[0].facts
    by_name = [{"Python": one.facts["python"], **_core(one.facts["packages"])} for one in ranks]
    differing = {one.name: one for one in differences(by_name)}
    fix = "start all ranks in the same environment (which python; pip list)"
    for name in by_name[0] | {"torch": ""}:
        if name in differing:
            yield failure(name, describe_difference(differing[name], ranks), fix)
        elif name in by_name[0]:
            yield ok(name, by_name[0][name] + same_on_all(ranks))
        else:
            yield failure(name, "not installed", "run pip install torch, or load its module")
    packages_by_rank = [one.facts["packages"] for one in ranks]
    others = [one for one in differences(packages_by_rank) if one.name not in CORE]
    if others:
        yield failure("packages", _describe_some(others, ranks, ""), fix)
    else:
        yield ok("packages", f"{len(found['packages'])} installed" + same_on_all(ranks))


def _core(found: Mapping[str, str]) -> dict[str, str]:
    return {name: found[name] for name in CORE if name in found}


def check_sources(ranks: Sequence[RankFacts[Sources]]) -> Iterator[CheckResult]:
    """Yield one line for the user's own source."""
    folder, files = ranks[0].facts["folder"], ranks[0].facts["files"]
    others = list(differences([one.facts["files"] for one in ranks]))
    if others:
        fix = "start all ranks from the same files: a shared directory, or the same commit (git status)"
        yield failure("source", f"in {folder}: {_describe_some(others, ranks, ' files')}", fix)
    else:
        most = f", the first {MOST_SOURCES:,}" if len(files) == MOST_SOURCES else ""
        yield ok("source", f"{len(files):,} Python files{most} in {folder}" + same_on_all(ranks))


def _describe_some(others: Sequence[RankDifference], ranks: Sequence[RankFacts[Any]], noun: str) -> str:
    named = "; ".join(f"{one.name} {describe_difference(one, ranks)}" for one in others[:_NAMED])
    more = f"; and {len(others) - _NAMED} more{noun}" if len(others) > _NAMED else ""
    return named + more
