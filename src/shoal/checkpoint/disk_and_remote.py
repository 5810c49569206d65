"""The kinds of stores: on a disk, where directories are renamed, and on object stores.

A rename follows the commit on a disk; on an object store, each attempt writes to names of its own.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.directory_names import PARTIAL, TRASH, DirectoryName, step_of
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.object_store import RemotePath
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.store import MANIFEST, Store, damage, manifest_of


def store_in(directory: AnyPath, files: Files) -> DiskStore | RemoteStore:
    """Return the checkpoint store of a directory, which depends on its file system."""
    if isinstance(directory, RemotePath):
        return RemoteStore(directory, files)
    return DiskStore(directory, files)


class DiskStore(Store[Path]):
    """A save fills `step-N.partial/`, commits it, and renames it to `step-N/`.

    The rename is not part of the commit. Removal begins with a rename to `step-N.trash/`.
    """

    def expect(self, step: int) -> None:
        """See Store."""

    def where(self, step: int) -> Path:
        """See Store."""
        return self.directory / str(DirectoryName(step))

    def unfinished(self, step: int) -> Path:
        """See Store."""
        return self.directory / str(DirectoryName(step, suffix=PARTIAL))

    def tidy(self) -> None:
        """See Store."""
        leftovers = [(name, path) for name, path in self.directories() if name.suffix]
        for name, path in leftovers:
            if name.suffix == PARTIAL:
                self._settle(name.step, path)
        for name, path in leftovers:
            if name.suffix == TRASH and os.path.lexists(path):
                # Network file systems can't remove open files; the next save removes them.
                with suppress(OSError):
                    self.remove_tree(path)

    def publish(self, step: int) -> Path:
        """See Store."""
        partial, final = self.unfinished(step), self.where(step)
        with suppress(OSError):
            # If a plain file has the name, the rename fails; the partial one stays and is valid.
            replaced = self._to_trash(final) if final.is_dir() else None
            self.files.rename(partial, final)
            if replaced is not None:
                self.remove_tree(replaced)
        return partial if partial.exists() else final

    def confirm(self, path: Path) -> None:
        """See Store."""
        there = {child.name for child in path.iterdir()}
        # A stopped process can remove or rename, but neither replace a file nor write into it.
        missing = (
            sorted({MANIFEST, *manifest_of(path).files} - there) if MANIFEST in there else [MANIFEST]
        )
        if missing:
            raise FileNotFoundError(
                errno.ENOENT,
                f"{missing[0]} was removed while it was saved: an earlier attempt that was stopped has "
                "finished an operation",
                str(path),
            )

    def remove(self, path: Path) -> None:
        """See Store."""
        self.remove_tree(self._to_trash(path))

    def remove_tree(self, path: Path) -> None:
        """See Store."""
        if path.is_symlink():
            self.files.unlink(path)  # its target belongs to another user or program
            return
        for child in sorted(path.iterdir(), key=lambda child: child.name != MANIFEST):
            if child.is_dir() or child.is_symlink():
                self.remove_tree(child)
            else:
                self.files.unlink(child)
        self.files.remove_directory(path)

    def _settle(self, step: int, partial: Path) -> None:
        if not self.is_committed(partial):
            self.remove_tree(partial)
        elif self.where(step).exists() and damage(partial, manifest_of(partial)):
            # A damaged newer checkpoint must not replace the older one of the same step.
            self.remove(partial)
        else:
            self.publish(step)

    def _to_trash(self, path: Path) -> Path:
        trash = self.directory / str(DirectoryName(step_of(path), suffix=TRASH))
        if os.path.lexists(trash):
            self.remove_tree(trash)
        self.files.rename(path, trash)
        return trash


class RemoteStore(Store[RemotePath]):
    """Each save has a directory with a unique name: `step-N.aA` for attempt A.

    On file systems without renames, on which writing to an existing file replaces it silently, two
    writers must not use the same path. An old attempt that was cut off and still runs writes into its
    own directories, and it does not remove checkpoints of a later attempt. It checks the fence before
    each operation, but a later attempt may begin between the check and the operation.
    """

    def __init__(self, directory: RemotePath, files: Files) -> None:
        super().__init__(directory, files)
        self._takes: Counter[int] = Counter()

    def expect(self, step: int) -> None:
        """See Store."""
        self._takes[step] += 1

    def where(self, step: int) -> RemotePath:
        """See Store."""
        return self.directory / str(DirectoryName(step, self.files.attempt, self._takes[step]))

    def unfinished(self, step: int) -> RemotePath:
        """See Store."""
        return self.where(step)

    def tidy(self) -> None:
        """See Store."""
        for name, path in self.directories():
            if name.numbered and not self.may_be_whole(name, path):
                self.remove(path)

    def publish(self, step: int) -> RemotePath:
        """See Store."""
        new = self.where(step)
        with suppress(OSError):
            for name, path in self.directories():
                if name.step == step and path != new:
                    self.remove(path)
        return new

    def confirm(self, path: RemotePath) -> None:
        """See Store. No other attempt uses this directory."""

    def remove(self, path: RemotePath) -> None:
        """See Store."""
        name = DirectoryName.read(path.name)
        if name is not None and name.attempt <= self.files.attempt:
            self.remove_tree(path)

    def remove_tree(self, path: RemotePath) -> None:
        """See Store."""
        manifest = path / MANIFEST
        if manifest.exists():
            self.files.unlink(manifest)
        self.files.remove_directory(path)
