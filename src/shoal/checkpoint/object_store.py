"""Paths on file systems of fsspec: object stores, SFTP, HDFS and all others with a package for it.

They guarantee less than a disk. Shoal neither renames nor syncs files there: a file exists once it has
been closed, and on most of them not before. A directory may be only a prefix of names. No answer is
cached: each one is the current state of the file system.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from shoal.distributed.passing_faults import note_cause, passing_cause
from shoal.util.errors import CheckpointError
from shoal.util.safe_text import MASK

BLOCK = 32 << 20
"""Bytes of a request. Some stores accept at most ten thousand requests per file."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^*?\[]+")
# Errors of packages that have a type but no number.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (TimeoutError, errno.ETIMEDOUT),
)


class RemoteError(OSError):
    """A failed operation of a remote file system. The files there may still be complete."""


def is_url(given: object) -> bool:
    """Return whether `given` is a URL: a path on another file system."""
    return isinstance(given, str) and "://" in given


def masked_url(url: str) -> str:
    """Return a URL without its user name and password, for messages."""
    return _split(url)[0]


def _split(url: str) -> tuple[str, str]:
    """Return a URL for messages, and the login that was in it."""
    protocol, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    # After the first slash an @ may be part of a name, and a password may contain a slash.
    if at and (":" in login or "/" not in login):
        return f"{protocol}://{MASK}@{place}", login
    return url, ""


@dataclass(frozen=True)
class _System:
    """A file system, and the secrets that its errors must not show."""

    fs: Any
    secrets: tuple[str, ...]

    def masked(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text


@dataclass(frozen=True)
class RemotePath:
    """A path on a file system of fsspec, with the methods of pathlib that checkpoints use.

    Its text is its URL without the password. A missing file raises FileNotFoundError with its URL, and
    any other failure RemoteError.
    """

    _system: _System = field(repr=False, compare=False)
    _key: str = field(repr=False, compare=False)
    _url: str

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._system, f"{self._key.rstrip('/')}/{name}", f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The path without its last part."""
        key, url = (text.rpartition("/")[0] for text in (self._key, self._url))
        return RemotePath(self._system, key, url)

    def exists(self) -> bool:
        """Return whether the path exists."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Return whether it is a directory, or a prefix of names."""
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return (self._info() or {}).get("type") == "file"

    def iterdir(self) -> Iterator[RemotePath]:
        """Return its entries, sorted by name."""
        with self.asking():
            self._system.fs.invalidate_cache()
            keys = [str(key).strip("/") for key in self._system.fs.ls(self._key, detail=False)]
        own = self._key.strip("/")
        names = {key.rpartition("/")[2] for key in keys if key != own}
        return (self / name for name in sorted(names - {"", ".", ".."}))

    def size(self) -> int:
        """Return the bytes of a file, or of all files in a directory."""
        info = self._info()
        if info is not None and info.get("type") == "file":
            return int(info["size"])
        with self.asking():
            found = self._system.fs.find(self._key, detail=True)
            return sum(int(each["size"] or 0) for each in found.values())

    def open(self) -> BufferedReader:
        """Open a file to read."""
        info = self._info()
        if info is None:
            raise self._missing()
        if info.get("type") != "file" or info.get("islink"):
            raise OSError(errno.EINVAL, "it is not a regular file", str(self))
        with self.asking():
            return BufferedReader(RemoteFile(self, self._open("rb"), writes=False), 1 << 20)

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` up to `end`."""
        with self.asking():
            return bytes(self._system.fs.cat_file(self._key, start=start, end=end))

    def create(self) -> RemoteFile:
        """Open a new file with a unique name; it exists once it is finished."""
        with self.asking(writes=True):
            try:
                file = self._open("wb")
            except FileNotFoundError:
                # Only file systems with real directories raise this.
                self._system.fs.makedirs(self._key.rpartition("/")[0], exist_ok=True)
                file = self._open("wb")
            return RemoteFile(self, file, writes=True)

    def unlink(self) -> None:
        """Remove a file."""
        with self.asking():
            self._system.fs.rm_file(self._key)

    def remove_tree(self) -> None:
        """Remove a directory with its contents; does nothing if it does not exist."""
        with self.asking(), suppress(FileNotFoundError):
            self._system.fs.invalidate_cache()
            self._system.fs.rm(self._key, recursive=True)

    def download(self, target: Path) -> None:
        """Copy a file to this machine; raises OSError (ENOSPC) if the disk has no space for it."""
        size, free = self.size(), shutil.disk_usage(target.parent).free
        if size > free:
            said = f"{os.strerror(errno.ENOSPC)}: {size:,} bytes are needed for a copy of {self.name}"
            raise OSError(errno.ENOSPC, f"{said}, {free:,} are free (df -h)", str(target.parent))
        with self.asking():
            self._system.fs.get_file(self._key, str(target))

    @contextmanager
    def asking(self, *, writes: bool = False) -> Iterator[None]:
        """Raise any failure of the block as an error with this path and without secrets.

        If the block `writes`, a missing file is a RemoteError: the error shows what is missing, such as
        a bucket.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not writes:
                raise self._missing() from None
            code = error.errno if isinstance(error, OSError) else None
            known = (number for kind, number in _CODES if isinstance(error, kind))
            code = code or next(known, errno.EIO)
            said = error.strerror if isinstance(error, OSError) else None
            said = said or f"{os.strerror(code)} ({type(error).__name__}: {error})"
            remote = RemoteError(code, self._system.masked(said), str(self))
            raise note_cause(remote, passing_cause(error)) from None  # the code may be a guess

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _open(self, mode: str) -> Any:
        return self._system.fs.open(self._key, mode, block_size=BLOCK)

    def _info(self) -> Mapping[str, Any] | None:
        # fsspec's own `exists` and `isdir` return False for a store that can't be reached.
        with self.asking():
            self._system.fs.invalidate_cache()
            try:
                return self._system.fs.info(self._key)  # type: ignore[no-any-return]
            except (FileNotFoundError, NotADirectoryError):
                return None


class RemoteFile(io.RawIOBase):
    """An open file of fsspec, whose errors have the path.

    A new file that is closed before it is finished is discarded.
    """

    def __init__(self, path: RemotePath, file: Any, *, writes: bool) -> None:
        super().__init__()
        self._path = path
        self._file = file
        self._writes = writes
        self._finished = False

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return not self._writes

    def writable(self) -> bool:
        """See io.RawIOBase."""
        return self._writes

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return not self._writes

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        with self._path.asking():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See io.RawIOBase."""
        with self._path.asking():
            self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        """See io.RawIOBase."""
        with self._path.asking():
            return int(self._file.tell())

    def write(self, data: Any) -> int:
        """Append all of `data`."""
        with self._path.asking(writes=True):
            self._file.write(data)
        return len(data)

    def finish(self) -> None:
        """Upload the complete file; it exists when this returns."""
        with self._path.asking(writes=True):
            self._file.close()
        self._finished = True

    def close(self) -> None:
        """Close the file; a new one that is not finished does not appear, if the store allows that."""
        if self.closed:
            return
        super().close()
        with suppress(Exception):
            if not self._writes:
                self._file.close()
            elif not self._finished:
                self._give_up()

    def _give_up(self) -> None:
        from fsspec.spec import AbstractBufferedFile

        if isinstance(self._file, AbstractBufferedFile):
            self._file.closed = True  # otherwise the store would complete the partial file
            self._file.discard()
        else:
            self._file.close()


def connect(url: str) -> Path | RemotePath:
    """Return the path of a URL: a Path if it is on a file system of this machine.

    Raises CheckpointError if fsspec, or its package for the protocol, is missing.
    """
    shown, login = _split(url)
    given = f"checkpoints at {shown}"
    if not _URL.fullmatch(url):
        raise CheckpointError(
            given=given,
            found="the URL must name one place: without *, ? or [ and without a chain of protocols",
            fix="pass a URL such as s3://bucket/run",
        )
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.registry import known_implementations
    except ImportError:
        raise CheckpointError(
            given=given,
            found="fsspec is not installed",
            fix="run pip install '.[remote]' in your Shoal checkout",
        ) from None
    protocol = url.partition("://")[0]
    words = {login, unquote(login), *login.split(":", 1)[1:], *unquote(login).split(":", 1)[1:]}
    secrets = tuple(sorted(words - {""}, key=len, reverse=True))
    try:
        fs, key = url_to_fs(url)
    except Exception as error:
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        missing = isinstance(error, ImportError) and package not in ("", "fsspec")
        raise CheckpointError(
            given=given,
            found=_System(None, secrets).masked(f"{type(error).__name__}: {error}"),
            fix=f"pip install {package}"
            if missing
            else "see the requirements of fsspec for this protocol: "
            "https://filesystem-spec.readthedocs.io/en/latest/api.html",
        ) from None
    if isinstance(fs, LocalFileSystem):
        return Path(key)
    return RemotePath(_System(fs, secrets), key, shown.rstrip("/"))
