"""Check that the dataset is the same on all ranks: its list of files, and samples of their contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from shoal.tools.doctor.findings import (
    CheckResult,
    RankFacts,
    describe_difference,
    failure,
    ok,
    same_on_all,
)
from shoal.util.differences import differences
from shoal.util.units import size

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
