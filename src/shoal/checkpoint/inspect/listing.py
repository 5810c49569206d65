"""The contents of a directory of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.directory_names import TRASH
from shoal.checkpoint.disk_and_remote import store_in
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
from shoal.checkpoint.store import MANIFEST, Manifest
from shoal.util.units import size

_LAST = 2.0**36  # in the year 4147; not every clock can show later times


def entries(folder: AnyPath, *, verify: bool) -> Iterator[Examined]:
    """Yield the checkpoints in a directory, oldest first; `verify` reads all of their files."""
    return examine_all(folder, lambda each: candidates(each)[::-1], read=verify)


def leftovers(folder: AnyPath) -> list[str]:
    """Return a line for each directory that takes space and is not a checkpoint.

    They are those of interrupted or running saves and removals.
    """
    removed = "an interrupted or running removal; the next save finishes it"
    saved = "an interrupted or running save; the next save removes it"
    paths = store_in(folder, Files()).leftovers()
    found = {path: removed if path.name.endswith(TRASH) else saved for path in paths}
    probes = [path for path in folder.iterdir() if path.name.startswith(".probe-") and path.is_file()]
    tested = "a write test of a start that was killed"
    found |= dict.fromkeys(sorted(probes, key=lambda path: path.name), tested)
    return [f"{path.name}, {size(size_of(path))}: {what}" for path, what in found.items()]


def entry(path: AnyPath, *, verify: bool) -> Examined:
    """Return one checkpoint or unfinished save; `verify` reads all of its files.

    Raises CheckpointError if a live run has removed it.
    """
    found = examine_listed(path, read=verify)
    if found is None and not path.is_dir():
        raise no_directory(path)
    return found or examine(path, read=verify)


def files_and_bytes(found: Examined) -> tuple[int, int]:
    """Return the number of files of a checkpoint and their size; of a damaged one those that exist."""
    path, said = found.path, found.manifest
    if said is not None:
        return len(said.files), sum(record.bytes for record in said.files.values())
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    return len(files), size_of(path)


def moment(path: AnyPath, info: dict[str, Any]) -> float | None:
    """Return the time of a save: from its info, or from the file of its manifest if that has one."""
    said = info.get("time")
    if isinstance(said, int | float) and 0 <= said < _LAST:
        return float(said)
    with suppress(FileNotFoundError):  # a live run has removed it
        return (path / MANIFEST).stat().st_mtime if isinstance(path, Path) else None
    return None


def info_of(manifest: Manifest | None) -> dict[str, Any]:
    """Return the info of a save; empty if it is damaged, or that of another program."""
    try:
        info = None if manifest is None else simplify(manifest.info)
    except (ValueError, TypeError, RecursionError):
        info = None
    return info if isinstance(info, dict) else {}
