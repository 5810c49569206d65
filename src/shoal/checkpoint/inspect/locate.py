"""The kinds of path: a run directory, a directory of checkpoints, or one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal.checkpoint.commit import store_in
from shoal.checkpoint.directory_names import DirectoryName, is_named
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.inspect.manifest import CheckpointManifest, inspect_checkpoint
from shoal.checkpoint.inspect.verify import Examined, examine
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.store import MANIFEST
from shoal.util.errors import CheckpointError

R = TypeVar("R")

_TRIES = 5
"""The number of searches for a checkpoint that a live run renames or removes."""

USUAL = "checkpoints"
"""The directory of the checkpoints in a run directory."""


def is_checkpoint(path: AnyPath) -> bool:
    """Return whether a path is that of one checkpoint, complete or not."""
    return (path / MANIFEST).is_file() or (is_named(path) and path.is_dir())


def folders(given: AnyPath) -> list[AnyPath]:
    """Return the directories with checkpoints: `given` itself, or those of a run, the usual one first.

    Raises CheckpointError if there is none.
    """
    if not given.is_dir():
        raise CheckpointError(
            given=str(given),
            found="it is a file" if given.exists() else "there is no such directory",
            fix="pass a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    inside: list[AnyPath] = sorted((path for path in given.iterdir() if path.is_dir()), key=_name)
    if any(map(is_named, inside)):
        return [given]
    found = [path for path in inside if any(map(is_named, path.iterdir()))]
    if not found:
        names = ", ".join(sorted(map(_name, given.iterdir()))[:5]) or "nothing"
        raise CheckpointError(
            given=str(given),
            found=f"no checkpoint (step-N) in it or in its folders; it holds {names}",
            fix="pass a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    return sorted(found, key=lambda path: path.name != USUAL)


def checkpoints(given: AnyPath) -> list[AnyPath]:
    """Return all checkpoints at `given`, complete or not: itself, or those in its folders."""
    if is_checkpoint(given):
        return [given]
    found = [path for folder in folders(given) for path in store_in(folder, Files()).candidates()]
    if not found:
        raise _unfinished(given)
    return found


def newest(given: AnyPath) -> AnyPath:
    """Return `given` if it is a checkpoint, or else the latest complete one in its first folder."""
    if is_checkpoint(given):
        return given
    store = store_in(folders(given)[0], Files())
    reasons: list[str] = []
    for path in store.candidates():
        found = examine_listed(path, read=False)
        if found is not None and not found.problems:
            return found.path
        if found is not None:
            reasons.append(f"{path.name}: {found.problems[0]}")
    if not reasons:
        raise _unfinished(given)
    raise CheckpointError(
        given=str(given),
        found=f"none is complete: {'; '.join(reasons)}",
        fix=f"shoal checkpoint ls {given}",
    )


def examine_listed(path: AnyPath, *, read: bool) -> Examined | None:
    """Examine a checkpoint that was listed, as `examine` does; return None if it was removed since.

    A live run renames `step-8.partial` to `step-8` when its save ends, and removes old checkpoints.
    """
    found = examine(path, read=read)
    if not found.problems or path.exists():
        return found
    name = DirectoryName.read(path.name)
    final = path if name is None else path.parent / str(name._replace(suffix=""))
    found = examine(final, read=read)
    return found if not found.problems or final.exists() else None


def read_newest(given: Sequence[AnyPath], action: Callable[[list[CheckpointManifest]], R]) -> R:
    """Return the result of `action` for the latest complete checkpoint of each of `given`.

    Calls it again if a live run has renamed or removed one of them.
    """
    tries = _TRIES
    while True:
        tries -= 1
        paths = [newest(each) for each in given]
        try:
            return action([inspect_checkpoint(path) for path in paths])
        except CheckpointError:
            if not tries or all(path.exists() for path in paths):
                raise


def _name(path: AnyPath) -> str:
    return path.name


def _unfinished(given: AnyPath) -> CheckpointError:
    return CheckpointError(
        given=str(given),
        found="it contains no finished save",
        fix=f"list its contents: shoal checkpoint ls {given}",
    )
