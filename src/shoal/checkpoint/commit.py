"""The two ways in which a checkpoint comes to its place: by a rename, or under a name of its own."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.directory_names import PARTIAL, TRASH, Name, step_of
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.object_store import RemotePath
from shoal.checkpoint.paths import AnyPath
from shoal.checkpoint.store import MANIFEST, Store, damage, manifest_of


def store_in(directory: AnyPath, files: Files) -> DiskStore | RemoteStore:
    """The checkpoints below a directory, in the way that its file system allows."""
    if isinstance(directory, RemotePath):
        return RemoteStore(directory, files)
    return DiskStore(directory, files)


class DiskStore(Store[Path]):
    """A save fills `step-N.partial/`; once that is committed, a rename to `step-N/` only tidies up.

    Removal begins with a rename to `step-N.trash/`.
    """

    def expect(self, step: int) -> None:
        """See Store."""

    def where(self, step: int) -> Path:
        """See Store."""
        return self.directory / str(Name(step))

    def under_way(self, step: int) -> Path:
        """See Store."""
        return self.directory / str(Name(step, suffix=PARTIAL))

    def tidy(self) -> None:
        """See Store."""
        leftovers = [(name, path) for name, path in self.directories() if name.suffix]
        for name, path in leftovers:
            if name.suffix == PARTIAL:
                self._settle(name.step, path)
        for name, path in leftovers:
            if name.suffix == TRASH and os.path.lexists(path):
                # Network file systems don't remove open files, which does no harm.
                with suppress(OSError):
                    self.remove_tree(path)

    def publish(self, step: int) -> Path:
        """See Store."""
        partial, final = self.under_way(step), self.where(step)
        with suppress(OSError):
            # Where a plain file has the name, the rename fails and the partial one stays, which counts.
            replaced = self._to_trash(final) if final.is_dir() else None
            self.files.rename(partial, final)
            if replaced is not None:
                self.remove_tree(replaced)
        return partial if partial.exists() else final

    def remove(self, path: Path) -> None:
        """See Store."""
        self.remove_tree(self._to_trash(path))

    def remove_tree(self, path: Path) -> None:
        """See Store."""
        if path.is_symlink():
            self.files.unlink(path)  # what it leads to is somebody else's
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
            # The older one of the same step must not give way to a damaged newer one.
            self.remove(partial)
        else:
            self.publish(step)

    def _to_trash(self, path: Path) -> Path:
        trash = self.directory / str(Name(step_of(path), suffix=TRASH))
        if os.path.lexists(trash):
            self.remove_tree(trash)
        self.files.rename(path, trash)
        return trash


class RemoteStore(Store[RemotePath]):
    """Each save has a directory of a name that no other has, `step-N.aA` by attempt A.

    Where nothing is renamed, and a file that exists is replaced without a word, writers must not meet:
    what an attempt that was cut off and lives on still writes is in directories of its own, and what a
    later one has saved it does not remove. A look at the fence comes before each operation, but there
    is a moment in between.
    """

    def __init__(self, directory: RemotePath, files: Files) -> None:
        super().__init__(directory, files)
        self._takes: Counter[int] = Counter()

    def expect(self, step: int) -> None:
        """See Store."""
        self._takes[step] += 1

    def where(self, step: int) -> RemotePath:
        """See Store."""
        return self.directory / str(Name(step, self.files.attempt, self._takes[step]))

    def under_way(self, step: int) -> RemotePath:
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

    def remove(self, path: RemotePath) -> None:
        """See Store."""
        name = Name.read(path.name)
        if name is not None and name.attempt <= self.files.attempt:
            self.remove_tree(path)

    def remove_tree(self, path: RemotePath) -> None:
        """See Store."""
        manifest = path / MANIFEST
        if manifest.exists():
            self.files.unlink(manifest)
        self.files.remove_directory(path)
