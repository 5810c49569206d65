"""An object store for tests: an fsspec file system whose objects several processes see.

`bucket:///folder/run` keeps them below a folder of this machine. As in a store there are no renames,
directories are beginnings of names, and an object appears when it is complete; or, with `torn`, as on
a server without that, it is there from its first byte on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

Hook = Callable[[str, str], None]


def nothing(operation: str, key: str) -> None:
    """A store that is in order."""


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """`before` and `after` are called at each operation with its name and the key."""

    protocol = "bucket"
    before: ClassVar[Hook] = staticmethod(nothing)
    after: ClassVar[Hook] = staticmethod(nothing)
    torn: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        rest = path.removeprefix("bucket://").rstrip("/")
        login, at, place = rest.rpartition("@")
        return place if at and ":" in login else rest

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        login, at, _ = path.removeprefix("bucket://").rpartition("@")
        return {"login": login} if at else {}

    def do(self, operation: str, key: str, action: Callable[[], Any]) -> Any:
        type(self).before(operation, key)
        result = action()
        type(self).after(operation, key)
        return result

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        key = self._strip_protocol(path)
        found: list[dict[str, Any]] = self.do("list", key, lambda: self._list(key))
        return found if detail else [each["name"] for each in found]

    def _list(self, key: str) -> list[dict[str, Any]]:
        if Path(key).is_file():
            return [self._describe(Path(key))]
        found = [self._describe(path) for path in _entries(Path(key))]
        if not found:
            raise FileNotFoundError(key)
        return found

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        found: dict[str, Any] = self.do("look", key, lambda: self._look(key))
        return found

    def _look(self, key: str) -> dict[str, Any]:
        if not Path(key).is_file() and not _entries(Path(key)):
            raise FileNotFoundError(key)
        return self._describe(Path(key))

    def _describe(self, path: Path) -> dict[str, Any]:
        kind = "file" if path.is_file() else "directory"
        size = path.stat().st_size if kind == "file" else 0
        return {"name": str(path), "size": size, "type": kind}

    def _rm(self, path: str) -> None:
        key = self._strip_protocol(path)
        # A store knows no directories to be removed.
        self.do("remove", key, lambda: None if Path(key).is_dir() else os.unlink(key))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        return self.do("open", path, lambda: _Object(self, path, mode, block_size))


def _entries(path: Path) -> list[Path]:
    """What is in a directory, but for what is not complete and for beginnings of no names."""
    if not path.is_dir():
        return []
    there = [each for each in sorted(path.iterdir()) if not each.name.startswith(".upload-")]
    return [each for each in there if each.is_file() or _entries(each)]


class _Object(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        target = Path(self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.with_name(f".upload-{secrets.token_hex(4)}")
        self._upload = target if self.fs.torn else hidden
        self._upload.write_bytes(b"")

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()

        def upload() -> None:
            half = len(data) // 2
            with self._upload.open("ab") as file:
                file.write(data[:half])
                file.flush()
                if self.fs.torn:
                    type(self.fs).before("write", self.path)
                file.write(data[half:])
            if final and not self.fs.torn:
                self._upload.replace(self.path)

        self.fs.do("complete" if final else "write", self.path, upload)
        return True

    def discard(self) -> None:
        if hasattr(self, "_upload"):
            self.fs.do("discard", self.path, lambda: self._upload.unlink(missing_ok=True))

    def _fetch_range(self, start: int, end: int) -> bytes:
        def read() -> bytes:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read(end - start)

        found: bytes = self.fs.do("read", self.path, read)
        return found


fsspec.register_implementation("bucket", Bucket, clobber=True)
