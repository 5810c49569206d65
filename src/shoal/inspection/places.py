"""What a path names: a run directory, a directory of checkpoints, or one checkpoint."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.store import MANIFEST, Files, Store, is_named
from shoal.errors import CheckpointError
from shoal.inspection.soundness import problems

USUAL = "checkpoints"
"""Where a Run keeps its checkpoints, in its directory."""


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint, whole or not."""
    return (path / MANIFEST).is_file() or (is_named(path) and path.is_dir())


def folders(given: Path) -> list[Path]:
    """The directories with checkpoints that `given` names: itself, or those of a run, the usual first.

    Raises CheckpointError where there is none.
    """
    if not given.is_dir():
        raise CheckpointError(
            given=str(given),
            found="it is a file" if given.exists() else "there is no such directory",
            fix="give a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    inside = sorted(path for path in given.iterdir() if path.is_dir())
    if any(map(is_named, inside)):
        return [given]
    found = [path for path in inside if any(map(is_named, path.iterdir()))]
    if not found:
        names = ", ".join(sorted(path.name for path in given.iterdir())[:5]) or "nothing"
        raise CheckpointError(
            given=str(given),
            found=f"no checkpoint (step-N) in it or in its folders; it holds {names}",
            fix="give a run directory, its checkpoints or one of them: shoal checkpoint ls runs/a",
        )
    return sorted(found, key=lambda path: path.name != USUAL)


def checkpoints(given: Path) -> list[Path]:
    """All checkpoints that `given` names, whole or not: itself, or those in its folders."""
    if is_checkpoint(given):
        return [given]
    found = [path for folder in folders(given) for path in Store(folder, Files()).candidates()]
    if not found:
        raise _unfinished(given)
    return found


def newest(given: Path) -> Path:
    """The checkpoint that `given` names: itself, or the newest in the first of its folders that has
    all its files."""
    if is_checkpoint(given):
        return given
    store = Store(folders(given)[0], Files())
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


def _unfinished(given: Path) -> CheckpointError:
    return CheckpointError(
        given=str(given),
        found="no save has been finished there",
        fix=f"shoal checkpoint ls {given} names what is there",
    )
