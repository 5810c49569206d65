"""The operations by which checkpoints change a file system, and its free space."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from shoal.checkpoint.object_store import RemoteFile, RemotePath
from shoal.checkpoint.paths import AnyPath

# Some network file systems can't sync a directory and don't need to.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Errors of file systems that can't reserve space, and of the C library's emulation.
_NO_RESERVATION = (errno.EBADF, errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP)


class FreeSpace(NamedTuple):
    """The bytes and files that a file system can still take; None if it does not report them."""

    bytes: int | None
    files: int | None


class Files:
    """All operations by which a checkpoint changes a file system.

    No other code of this package changes files, so that a subclass can count, reject or interrupt each
    operation. `room` changes nothing; it is here so that a test can replace it.
    """

    @property
    def attempt(self) -> int:
        """The attempt at a run whose operations these are; 0 if attempts are not counted."""
        return 0

    def make_directory(self, path: AnyPath) -> None:
        """Create a directory and its parents, unless it exists. Remote directories need no creation.

        Each is synced into its parent, or a power failure could lose it with all checkpoints in it.
        """
        if isinstance(path, RemotePath) or path.is_dir():
            return
        try:
            self.create_directory(path)
        except FileNotFoundError:
            self.make_directory(path.parent)
            self.create_directory(path)
        self.sync_directory(path.parent)

    def create_directory(self, path: Path) -> None:
        """Create one directory, unless another rank creates it at the same moment."""
        path.mkdir(exist_ok=True)

    def create(self, path: AnyPath) -> BinaryIO:
        """Open a new file.

        A file that exists belongs to another writer and raises an error, if the file system can tell.
        """
        if isinstance(path, RemotePath):
            return cast(BinaryIO, path.create())
        return path.open("xb", buffering=1 << 20)

    def reserve(self, file: BinaryIO, size: int) -> None:
        """Reserve `size` bytes for a new file, so that a full disk or a quota raises an error at once.

        Does nothing on file systems without reservation. For those the C library would write into each
        block, except to a file that is open to append (posix_fallocate(3)).
        """
        if isinstance(file, RemoteFile):
            return
        descriptor = file.fileno()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)

    def room(self, path: AnyPath) -> FreeSpace:
        """Return the free space for this user on the file system of a path, which may not exist yet."""
        if isinstance(path, RemotePath):
            return FreeSpace(None, None)
        while not path.exists():
            path = path.parent
        found = os.statvfs(path)
        root = os.geteuid() == 0  # may use the reserved blocks
        blocks, files = (found.f_bfree, found.f_ffree) if root else (found.f_bavail, found.f_favail)
        # Some file systems count neither and report 0.
        return FreeSpace(
            blocks * found.f_frsize if found.f_blocks else None, files if found.f_files else None
        )

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Write a file's content to the disk. A remote file exists from this moment on."""
        if isinstance(file, RemoteFile):
            file.finish()
            return
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: AnyPath) -> None:
        """Write a directory's entries to the disk."""
        if isinstance(path, RemotePath):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                error.filename = str(path)
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory."""
        source.rename(target)

    def unlink(self, path: AnyPath) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: AnyPath) -> None:
        """Remove an empty directory; a remote one with its contents."""
        if isinstance(path, RemotePath):
            path.remove_tree()
        else:
            path.rmdir()
