"""Files to write: only regular ones, never through a symbolic link, and complete when they appear.

A run directory may come from someone else, with links in place of files that a run writes.
Directories in it may be links, since users keep checkpoints on another file system that way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_to_write(path: Path, flags: int) -> int:
    """Open with `flags` of `os.open`; create a missing file. Raises OSError for a link or a pipe."""
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "it is a symbolic link, and Shoal does not write to links") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path, "it is not a regular file")
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


def _refused(path: Path, why: str) -> OSError:
    return OSError(errno.ELOOP, why, str(path))
