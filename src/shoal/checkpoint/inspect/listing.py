"""The contents of a directory of checkpoints, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.commit import store_in
from shoal.checkpoint.directory_names import TRASH
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.inspect.locate import (
    Examined,
    candidates,
    examine,
    examine_all,
    examine_listed,
    no_directory,
)
from shoal.checkpoint.inspect.manifest import simplify
from shoal.checkpoint.paths import AnyPath, size_of
from shoal.checkpoint.store import MANIFEST

_LAST = 2.0**36  # in the year 4147; not every clock can show later times


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """A checkpoint; `saved` is in seconds since the epoch. Values of a damaged one may be unknown."""

    path: AnyPath
    info: dict[str, Any]
    saved: float | None
    ranks: int | None
    files: int
    bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A directory that takes space and is not a checkpoint."""

    path: AnyPath
    bytes: int
    what: str


def entries(folder: AnyPath, *, verify: bool) -> Iterator[CheckpointEntry]:
    """Yield the checkpoints in a directory, oldest first; `verify` reads all of their files."""
    for found in examine_all(folder, lambda each: candidates(each)[::-1], read=verify):
        yield _entry(found)


def leftovers(folder: AnyPath) -> list[Leftover]:
    """Return the directories of interrupted or running saves and removals."""
    removed = "an interrupted or running removal; the next save finishes it"
    saved = "an interrupted or running save; the next save removes it"
    found = [
        Leftover(path=path, bytes=size_of(path), what=removed if path.name.endswith(TRASH) else saved)
        for path in store_in(folder, Files()).leftovers()
    ]
    probes = [path for path in folder.iterdir() if path.name.startswith(".probe-") and path.is_file()]
    return found + [
        Leftover(path=path, bytes=size_of(path), what="a write test of a start that was killed")
        for path in sorted(probes, key=lambda path: path.name)
    ]


def entry(path: AnyPath, *, verify: bool) -> CheckpointEntry:
    """Return one checkpoint or unfinished save; `verify` reads all of its files.

    Raises CheckpointError if a live run has removed it.
    """
    found = examine_listed(path, read=verify)
    if found is None and not path.is_dir():
        raise no_directory(path)
    return _entry(found or examine(path, read=verify))


def _entry(found: Examined) -> CheckpointEntry:
    path, said = found.path, found.manifest
    if said is None:
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
        return CheckpointEntry(
            path=path,
            info={},
            saved=None,
            ranks=None,
            files=len(files),
            bytes=size_of(path),
            problems=tuple(found.problems),
        )
    info = _info(said.info)
    return CheckpointEntry(
        path=path,
        info=info,
        saved=moment(path, info),
        ranks=said.world_size,
        files=len(said.files),
        bytes=sum(record.bytes for record in said.files.values()),
        problems=tuple(found.problems),
    )


def moment(path: AnyPath, info: dict[str, Any]) -> float | None:
    """Return the time of a save: from its info, or from the file of its manifest if that has one."""
    said = info.get("time")
    if isinstance(said, int | float) and 0 <= said < _LAST:
        return float(said)
    with suppress(FileNotFoundError):  # a live run has removed it
        return (path / MANIFEST).stat().st_mtime if isinstance(path, Path) else None
    return None


def _info(encoded: Any) -> dict[str, Any]:
    try:
        info = simplify(encoded)
    except (ValueError, TypeError, RecursionError):
        info = None  # the manifest of another program
    return info if isinstance(info, dict) else {}
