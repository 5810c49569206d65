"""What a path names: a run directory, a directory of checkpoints, or one checkpoint."""

from __future__ import annotations

from shoal.checkpoint.files import Files
from shoal.checkpoint.naming import is_named
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.store import MANIFEST
from shoal.checkpoint.stores import store_in
from shoal.errors import CheckpointError
from shoal.inspection.soundness import problems

USUAL = "checkpoints"
"""Where a Run keeps its checkpoints, in its directory."""


def is_checkpoint(path: AnyPath) -> bool:
    """Whether a path names one checkpoint, whole or not."""
    return (path / MANIFEST).is_file() or (is_named(path) and path.is_dir())


def folders(given: AnyPath) -> list[AnyPath]:
    """The directories with checkpoints that `given` names: itself, or those of a run, the usual first.

    Raises CheckpointError where there is none.
    """
    if not given.is_dir():
        raise CheckpointError(
            given=str(given),
            found="it is a file" if given.exists() else "there is no such directory",
            fix="give a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
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
            fix="give a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    return sorted(found, key=lambda path: path.name != USUAL)


def checkpoints(given: AnyPath) -> list[AnyPath]:
    """All checkpoints that `given` names, whole or not: itself, or those in its folders."""
    if is_checkpoint(given):
        return [given]
    found = [path for folder in folders(given) for path in store_in(folder, Files()).candidates()]
    if not found:
        raise _unfinished(given)
    return found


def newest(given: AnyPath) -> AnyPath:
    """The checkpoint that `given` names: itself, or the newest in the first of its folders that has
    all its files."""
    if is_checkpoint(given):
        return given
    store = store_in(folders(given)[0], Files())
    reasons: list[str] = []
    for path in store.candidates():
        found = problems(path, read=False)
        if not found:
            return path
        reasons.append(f"{path.name}: {found[0]}")
    if not reasons:
        raise _unfinished(given)
    raise CheckpointError(
        given=str(given),
        found=f"none is whole: {'; '.join(reasons)}",
        fix=f"shoal checkpoint ls {given}",
    )


def _name(path: AnyPath) -> str:
    return path.name


def _unfinished(given: AnyPath) -> CheckpointError:
    return CheckpointError(
        given=str(given),
        found="no save has been finished there",
        fix=f"shoal checkpoint ls {given} names what is there",
    )
