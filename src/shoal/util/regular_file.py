"""Files to write: only regular ones, never through a symbolic link, and complete when they appear.

A run directory may come from someone else, with links in place of files that a run writes.
Directories in it may be links, since users keep checkpoints on another file system that way; but not
`attempts`, in which a run also removes files.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LINK = "it is a symbolic link, and Shoal does not write to links"


def open_to_write(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open with `flags` of `os.open`; create a missing file with `mode`.

    Raises OSError for a link or a pipe.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refused(path, LINK) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused(path, "it is not a regular file")
    return descriptor


def open_lock(path: Path) -> int:
    """Open a file to lock, as `open_to_write` does. Only users who can write its directory can open it.

    A user who can read a file can lock it too. In a directory that a group can write, its members take
    turns. A file of an earlier version gets these permissions when its owner opens it.
    """
    descriptor = open_to_write(path, os.O_RDWR, 0o600)
    folder = os.stat(path.parent)
    if os.fstat(descriptor).st_uid == os.geteuid():
        with suppress(OSError):  # the file system has no permissions
            os.fchmod(descriptor, 0o600)
        if folder.st_mode & stat.S_IWGRP:
            with suppress(OSError):  # this user is not in the group
                os.fchown(descriptor, -1, folder.st_gid)
                os.fchmod(descriptor, 0o660)
    return descriptor


def write_new(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file that does not exist yet; if `private`, only its owner can read it. Raises
    FileExistsError.
    """
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def replace(path: Path, text: str) -> None:
    """Write a file atomically, and replace a file or link with its name."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # left by a killed process, or a link
    write_new(partial, text)
    partial.replace(path)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a file next to `path` to write to; rename it to `path` after the block, or remove it.

    So a reader sees either the old or the new file, and two processes may write it at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def refused(path: Path, why: str) -> OSError:
    """Return the error for a path that a run must not use."""
    return OSError(errno.ELOOP, why, str(path))
