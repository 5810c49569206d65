"""Paths of checkpoints: on this machine's file systems, or on fsspec file systems."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from shoal.checkpoint.object_store import RemotePath, connect, is_url

AnyPath = Path | RemotePath
P = TypeVar("P", Path, RemotePath)


def path_from(given: str | Path) -> AnyPath:
    """Return the path of a string, maybe a URL; raises CheckpointError if it can't be reached."""
    return connect(given) if isinstance(given, str) and is_url(given) else Path(given)


def lasting(path: AnyPath) -> AnyPath:
    """Return the same path, independent of the working directory of the process."""
    return path.absolute() if isinstance(path, Path) else path


def open_file(path: AnyPath) -> BufferedReader:
    """Open a regular file to read.

    Raises OSError for other files: a pipe would make readers wait forever, and a link may lead
    anywhere.
    """
    if isinstance(path, RemotePath):
        return path.open()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"{os.strerror(code)}: it is not a regular file", str(path))
    return open(descriptor, "rb")


@contextmanager
def local_file(path: AnyPath) -> Iterator[Path]:
    """Yield a path on this machine: the file itself, or a copy that exists during the block."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        copy = Path(folder) / path.name
        path.download(copy)
        yield copy


def size_of(path: AnyPath) -> int:
    """Return the bytes of a file, or of all files in a directory; links are not followed."""
    if isinstance(path, RemotePath):
        return path.size()
    size = 0
    with suppress(FileNotFoundError):  # a live run removes and renames them
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and not file.is_symlink():
                size += file.lstat().st_size
    return size


def how_to_remove(path: AnyPath, below: str = "") -> str:
    """Return the command that removes a path, or the files `below` it."""
    if isinstance(path, RemotePath):
        return f"remove {path}{below} with the tools of that store"
    return f"rm -r {shlex.quote(str(path))}{below}"
