"""Paths on file systems of fsspec's: object stores, SFTP, HDFS, whatever has a package for it.

They promise less than a disk does. Nothing is renamed or synced there: a file is there once it has
been closed, and on most of them not before. A directory may be no more than the beginning of names.
Nothing that was asked once is remembered: each answer is the file system's own, of that moment.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from shoal.util.errors import CheckpointError
from shoal.util.text import MASK

BLOCK = 32 << 20
"""Bytes of a request. Some stores take ten thousand of them for a file at most."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^*?\[]+")
# Errors of packages that have a type and no number.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (TimeoutError, errno.ETIMEDOUT),
)


class RemoteError(OSError):
    """What such a file system did not do. It says nothing about the files there: they may be whole."""


def is_url(given: object) -> bool:
    """Whether this names a path on another file system."""
    return isinstance(given, str) and "://" in given


def masked_url(url: str) -> str:
    """A URL that may be shown: without a name and a password."""
    return _split(url)[0]


def _split(url: str) -> tuple[str, str]:
    """A URL that may be shown, and the login that was in it."""
    protocol, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    # Beyond the first slash an @ may be part of a name; and a password may have a slash in it.
    if at and (":" in login or "/" not in login):
        return f"{protocol}://{MASK}@{place}", login
    return url, ""


@dataclass(frozen=True)
class _System:
    """A file system, and what its errors may not tell."""

    fs: Any
    secrets: tuple[str, ...]

    def masked(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text


class RemotePath:
    """A path on a file system of fsspec's, with what checkpoints need of pathlib's methods.

    Its text is its URL, which shows no password. What is not there is a FileNotFoundError that names
    it, and what else can't be done a RemoteError.
    """

    def __init__(self, system: _System, key: str, url: str) -> None:
        self._system = system
        self._key = key
        self._url = url

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._system, f"{self._key.rstrip('/')}/{name}", f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last part."""
        key, url = (text.rpartition("/")[0] for text in (self._key, self._url))
        return RemotePath(self._system, key, url)

    def exists(self) -> bool:
        """Whether anything is there."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Whether it is a directory, or the beginning of names."""
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        """Whether it is a file."""
        return (self._info() or {}).get("type") == "file"

    def iterdir(self) -> Iterator[RemotePath]:
        """What is in it, in no order."""
        with self.asking():
            self._system.fs.invalidate_cache()
            keys = [str(key).strip("/") for key in self._system.fs.ls(self._key, detail=False)]
        own = self._key.strip("/")
        names = {key.rpartition("/")[2] for key in keys if key != own}
        return (self / name for name in sorted(names - {"", ".", ".."}))

    def size(self) -> int:
        """The bytes of a file, or of all files in a directory."""
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
            raise OSError(errno.EINVAL, "it is no regular file", str(self))
        with self.asking():
            return BufferedReader(RemoteFile(self, self._open("rb"), writes=False), 1 << 20)

    def create(self) -> RemoteFile:
        """Open a new file, of nobody else's name; it is there once it has been finished."""
        with self.asking(writes=True):
            try:
                file = self._open("wb")
            except FileNotFoundError:
                # Only file systems with real directories say so.
                self._system.fs.makedirs(self._key.rpartition("/")[0], exist_ok=True)
                file = self._open("wb")
            return RemoteFile(self, file, writes=True)

    def unlink(self) -> None:
        """Remove a file."""
        with self.asking():
            self._system.fs.rm_file(self._key)

    def remove_tree(self) -> None:
        """Remove a directory with all that is in it; one that is gone is fine."""
        with self.asking(), suppress(FileNotFoundError):
            self._system.fs.invalidate_cache()
            self._system.fs.rm(self._key, recursive=True)

    def download(self, target: Path) -> None:
        """Copy a file to this machine; raises OSError (ENOSPC) where there is no room for it."""
        size, free = self.size(), shutil.disk_usage(target.parent).free
        if size > free:
            said = f"{os.strerror(errno.ENOSPC)}: {size:,} bytes are needed for a copy of {self.name}"
            raise OSError(errno.ENOSPC, f"{said}, {free:,} are free (df -h)", str(target.parent))
        with self.asking():
            self._system.fs.get_file(self._key, str(target))

    @contextmanager
    def asking(self, *, writes: bool = False) -> Iterator[None]:
        """Whatever goes wrong there, as an error that names this path and no secret.

        Who writes is not told that a file is missing: what is, a bucket maybe, must be named.
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
            raise RemoteError(code, self._system.masked(said), str(self)) from None

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _open(self, mode: str) -> Any:
        return self._system.fs.open(self._key, mode, block_size=BLOCK)

    def _info(self) -> Mapping[str, Any] | None:
        # fsspec's own `exists` and `isdir` take a store that can't be reached for a no.
        with self.asking():
            self._system.fs.invalidate_cache()
            try:
                return self._system.fs.info(self._key)  # type: ignore[no-any-return]
            except (FileNotFoundError, NotADirectoryError):
                return None


class RemoteFile(io.RawIOBase):
    """An open file of fsspec's, whose errors are those of its path.

    A new one that is closed without having been finished is given up.
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
        """Bring the whole file there: when this returns, it is."""
        with self._path.asking(writes=True):
            self._file.close()
        self._finished = True

    def close(self) -> None:
        """Let go of the file; a new one that is not finished does not appear, if that can be had."""
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
            self._file.closed = True  # else what there is of it would be completed
            self._file.discard()
        else:
            self._file.close()


def connect(url: str) -> Path | RemotePath:
    """The path that a URL names; one of this machine's own file systems is a Path.

    Raises CheckpointError where fsspec, or its package for the protocol, is missing.
    """
    shown, login = _split(url)
    given = f"checkpoints at {shown}"
    if not _URL.fullmatch(url):
        raise CheckpointError(
            given=given,
            found="it is no URL of a single place: no *, ? or [ and no chain of protocols",
            fix="give one like s3://bucket/run",
        )
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.registry import known_implementations
    except ImportError:
        raise CheckpointError(
            given=given,
            found="fsspec is not installed",
            fix="pip install '.[remote]' in the checkout of Shoal",
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
            else "see what fsspec needs for this protocol: "
            "https://filesystem-spec.readthedocs.io/en/latest/api.html",
        ) from None
    if isinstance(fs, LocalFileSystem):
        return Path(key)
    return RemotePath(_System(fs, secrets), key, shown.rstrip("/"))
