"""Check that Python, torch, packages, source and dataset are the same on all ranks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
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
from shoal.util.units import size

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
    by_name = [
        {"Python": one.facts["python"]}
        | {name: version for name, version in one.facts["packages"].items() if name in CORE}
        for one in ranks
    ]
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


SAMPLES = 16
"""Number of files that are sampled, evenly chosen in the order of their names."""

SAMPLE_BYTES = 1 << 16
"""Bytes that are read of each, at its beginning and at its end."""


class Dataset(TypedDict):
    """Number of files, their bytes, and digests: of names and sizes, and of samples."""

    path: str
    files: int
    bytes: int
    listing: str
    content: str


def describe_dataset(path: Path) -> Dataset:
    """Return the facts about a file, or a folder and all below it; times of files don't count."""
    files = sorted(_files(path)) if path.is_dir() else [("", os.stat(path).st_size)]
    listing, content = hashlib.sha256(), hashlib.sha256()
    for name, length in files:
        listing.update(f"{name}\0{length}\0".encode("utf-8", "surrogateescape"))
    count = min(SAMPLES, len(files))
    for name, length in (files[index * len(files) // count] for index in range(count)):
        with (path / name if name else path).open("rb") as file:
            content.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, length - SAMPLE_BYTES))
            content.update(file.read(SAMPLE_BYTES))
    return Dataset(
        path=str(path.absolute()),
        files=len(files),
        bytes=sum(length for _, length in files),
        listing=listing.hexdigest()[:12],
        content=content.hexdigest()[:12],
    )


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    todo = [(os.fspath(folder), "")]
    while todo:
        here, inside = todo.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                name = f"{inside}{entry.name}"
                if entry.is_dir():
                    todo.append((entry.path, f"{name}/"))
                else:
                    yield name, entry.stat().st_size


def check_dataset(ranks: Sequence[RankFacts[Dataset]]) -> Iterator[CheckResult]:
    """Yield one line for the dataset."""
    found = ranks[0].facts
    fix = f"compare {found['path']} on these hosts (du -sb, find | wc -l); copy it again if it differs"
    told = {"files": "files", "bytes": "bytes", "listing": "names and sizes", "content": "content"}
    facts = [{name: str(one.facts[name]) for name in told} for one in ranks]  # type: ignore[literal-required]
    others = {one.name: one for one in differences(facts)}
    for name, text in told.items():
        if name in others:
            yield failure("dataset", f"{text}: {describe_difference(others[name], ranks)}", fix)
            return
    looked = "sampled" if found["files"] <= SAMPLES else f"{SAMPLES} sampled"
    text = f"{found['files']:,} files, {size(found['bytes'])}, {looked}"
    yield ok("dataset", text + same_on_all(ranks))
