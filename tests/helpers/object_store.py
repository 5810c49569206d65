"""An object store for tests, an fsspec file system that several processes see; checkpoints in it.

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
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from helpers.checkpoint_files import Alone
from shoal.checkpoint import AnyPath, Checkpoints, Fence, FencedFiles, Files
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.store import damage, manifest_of

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

NUMBERS = 700


def state(version: int) -> dict[str, Any]:
    return {"version": version, "weight": torch.full((NUMBERS,), float(version))}


def begin(place: AnyPath, keep: int = 10, number: int | None = None) -> Checkpoints:
    """As a Run does: by the next attempt, or one of a `number`."""
    fence = Fence(place / "attempts")
    fence.number = fence.take() if number is None else number
    return Checkpoints(place / "checkpoints", Alone(), keep=keep, files=FencedFiles(fence))


def save(checkpoints: Checkpoints, *steps: int, version: int = 0) -> None:
    for step in steps:
        checkpoints.save(step, state(version or step), {"rank": 0}, {"at": step})


def restored(place: AnyPath) -> tuple[int, int]:
    """The step and the version of what is restored, all of it having been looked at."""
    loaded = Checkpoints(place / "checkpoints", Alone()).restore()
    assert loaded is not None
    version = loaded.state["version"]
    assert torch.equal(loaded.state["weight"], state(version)["weight"])
    return loaded.step, version


def damaged(place: AnyPath) -> list[str]:
    """What is listed as a checkpoint and is not whole."""
    found = store_in(place / "checkpoints", Files()).candidates()
    return [path.name for path in found if damage(path, manifest_of(path)) is not None]


class DeadError(BaseException):
    """The process is no more: whatever it would do, it does not."""


class Failing:
    """Fails at operation `number`, and after it if the process is dead then."""

    def __init__(self, number: int | None, error: BaseException) -> None:
        self.done: list[str] = []
        self._number = number
        self._error = error

    def __call__(self, operation: str, key: str) -> None:
        self.done.append(operation)
        if self._number is None:
            return
        at = len(self.done) - 1
        if at == self._number or (isinstance(self._error, DeadError) and at > self._number):
            raise self._error
