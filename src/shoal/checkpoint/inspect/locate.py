"""The checkpoints at a path: of a run directory, of a directory of checkpoints, or one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

from shoal.checkpoint.directory_names import is_named, step_of
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.inspect.manifest import CheckpointManifest, inspect_checkpoint
from shoal.checkpoint.object_store import RemoteError, RemotePath
from shoal.checkpoint.paths import AnyPath, open_file
from shoal.checkpoint.store import MANIFEST, DamageError, Manifest, manifest_of
from shoal.checkpoint.tensor_index import STATE, read_tensor_index
from shoal.util.errors import CheckpointError

R = TypeVar("R")

_TRIES = 5
"""The number of searches for a checkpoint that a live run renames, replaces or removes."""

USUAL = "checkpoints"
"""The directory of the checkpoints in a run directory."""

THREADS = 8
"""The number of reading threads; more gain little and slow down other users of the file system."""


class Examined(NamedTuple):
    """A checkpoint that was read: its manifest, unless that is damaged, and its problems."""

    path: AnyPath
    manifest: Manifest | None
    problems: list[str]


def examine(path: AnyPath, *, read: bool) -> Examined:
    """Examine a checkpoint; it has no problems if it is complete. With `read`, read its files."""
    try:
        said = manifest_of(path)
    except DamageError as damage:
        return Examined(path, None, [str(damage)])
    names = sorted(said.files)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        # Hashing and reading release the GIL.
        found = list(
            threads.map(lambda name: said.files[name].difference(path / name, read=read), names)
        )
    listed = [f"{name} {reason}" for name, reason in zip(names, found, strict=True) if reason]
    if read and not listed:
        try:
            with open_file(path / STATE) as file:
                read_tensor_index(file.read(), said)
        except RemoteError:
            raise
        except (DamageError, OSError) as error:
            listed = [str(error)]
    return Examined(path, said, listed)


def is_checkpoint(path: AnyPath) -> bool:
    """Return whether a path is that of one checkpoint, complete or not."""
    return (path / MANIFEST).is_file() or (is_named(path) and path.is_dir())


def folders(given: AnyPath) -> list[AnyPath]:
    """Return the directories with checkpoints: `given` itself, or those of a run, the usual one first.

    Raises CheckpointError if there is none.
    """
    if not given.is_dir():
        raise no_directory(given)
    inside: list[AnyPath] = sorted(given.iterdir(), key=_name)
    # One that a live run has renamed since is neither a file nor a directory.
    if any(is_named(path) and not path.is_file() for path in inside):
        return [given]
    found = [path for path in inside if path.is_dir() and any(map(is_named, path.iterdir()))]
    if not found:
        names = ", ".join(sorted(map(_name, given.iterdir()))[:5]) or "nothing"
        raise CheckpointError(
            given=str(given),
            found=f"no checkpoint (step-N) in it or in its folders; it holds {names}",
            fix="pass a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    return sorted(found, key=lambda path: path.name != USUAL)


def candidates(folder: AnyPath) -> Sequence[AnyPath]:
    """Return the checkpoints in a directory, complete or not, newest first."""
    return store_in(folder, Files()).candidates()


def checkpoints(given: AnyPath) -> list[AnyPath]:
    """Return all checkpoints at `given`, complete or not: itself, or those in its folders."""
    if is_checkpoint(given):
        return [given]
    found = [path for folder in folders(given) for path in candidates(folder)]
    if not found:
        raise _unfinished(given)
    return found


def newest(given: AnyPath) -> AnyPath:
    """Return `given` if it is a checkpoint, or else the latest complete one in its first folder."""
    if is_checkpoint(given):
        return given
    reasons: list[str] = []
    for found in examine_all(folders(given)[0], candidates, read=False):
        if not found.problems:
            return found.path
        reasons.append(f"{found.path.name}: {found.problems[0]}")
    if not reasons:
        raise _unfinished(given)
    raise CheckpointError(
        given=str(given),
        found=f"none is complete: {'; '.join(reasons)}",
        fix=f"shoal checkpoint ls {given}",
    )


def examine_all(
    given: AnyPath, listed: Callable[[AnyPath], Sequence[AnyPath]], *, read: bool
) -> Iterator[Examined]:
    """Examine the checkpoints `listed(given)`, as `examine` does, and yield each once.

    If a live run has removed one of them since, list them again. Raises CheckpointError if all were
    removed each time.
    """
    done: set[AnyPath] = set()
    for _ in range(_TRIES):
        removed = False
        for path in listed(given):
            found = None
            if path not in done:
                found = examine_listed(path, read=read)
                removed = removed or found is None
            if found is not None and found.path not in done:
                done.add(found.path)
                yield found
        if not removed:
            return
    if not done:
        raise _unfinished(given)


def examine_listed(path: AnyPath, *, read: bool) -> Examined | None:
    """Examine a checkpoint that was listed, as `examine` does; return None if it was removed since.

    A live run renames `step-8.partial` to `step-8` when its save ends, which may replace another
    `step-8`, and removes old checkpoints. Raises CheckpointError if it is replaced each time.
    """
    for _ in range(_TRIES):
        before = _version(path)
        found = examine(path, read=read)
        if not found.problems:
            return found
        there = _saves(path)
        if path in there and _version(path) == before:
            return found
        if not there:
            return None
        path = there[0]
    raise _unsteady(path)


def read_newest(given: Sequence[AnyPath], action: Callable[[list[CheckpointManifest]], R]) -> R:
    """Return the result of `action` for the latest complete checkpoint of each of `given`.

    Calls it again if a live run has replaced one of them, or if it failed and one was renamed or
    removed.
    """
    tries = _TRIES
    while True:
        tries -= 1
        paths = [newest(each) for each in given]
        before = [_version(path) for path in paths]
        try:
            result = action([inspect_checkpoint(path) for path in paths])
        except CheckpointError:
            if not tries or (None not in before and before == [_version(path) for path in paths]):
                raise
            continue
        # After a removal or a rename, open files still have the content of the same save.
        replaced = [
            path for path, old in zip(paths, before, strict=True) if _version(path) not in (None, old)
        ]
        if not replaced:
            return result
        if not tries:
            raise _unsteady(replaced[0])


def _saves(path: AnyPath) -> Sequence[AnyPath]:
    """Return the checkpoints, newest first, that may be the one that was at `path`."""
    if not is_named(path):
        return [path] if is_checkpoint(path) else []
    return [each for each in candidates(path.parent) if step_of(each) == step_of(path)]


def _version(path: AnyPath) -> tuple[int, int] | None:
    """Return a value that differs between saves at one path; None if there is no manifest."""
    manifest = path / MANIFEST
    if isinstance(manifest, RemotePath):
        return (0, 0) if manifest.exists() else None  # there, each save has its own path
    with suppress(OSError):
        found = manifest.lstat()
        return found.st_ino, found.st_mtime_ns
    return None


def no_directory(given: AnyPath) -> CheckpointError:
    """Return the error for a path that is not a directory."""
    return CheckpointError(
        given=str(given),
        found="it is a file" if given.exists() else "there is no such directory",
        fix="pass a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
    )


def _name(path: AnyPath) -> str:
    return path.name


def _unfinished(given: AnyPath) -> CheckpointError:
    return CheckpointError(
        given=str(given),
        found="it contains no finished save",
        fix=f"list its contents: shoal checkpoint ls {given}",
    )


def _unsteady(path: AnyPath) -> CheckpointError:
    return CheckpointError(
        given=str(path),
        found=f"a live run replaced it each time it was read, {_TRIES} times",
        fix="try again when the run saves less often, or read another checkpoint",
    )
