"""A directory of small files, as shared state of an explored world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import BytesIO
from types import SimpleNamespace
from typing import Any

from helpers.exploration.explorer import Execution


class SharedPath:
    """The directory itself or a file in it; each method is one atomic step."""

    def __init__(self, world: Execution, name: str = "") -> None:
        self._world = world
        self._file = name

    def __truediv__(self, name: str) -> SharedPath:
        return type(self)(self._world, name)

    def __str__(self) -> str:
        return f"shared/{self._file}"

    @property
    def name(self) -> str:
        return self._file

    @property
    def parent(self) -> SharedPath:
        return type(self)(self._world)

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """The directory exists."""

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[SharedPath]:
        names = self._world.operate("list", lambda: tuple(sorted(self._world.shared)))
        return (self / name for name in names if "/" not in name)

    def unlink(self) -> None:
        def remove() -> bool:
            return self._world.shared.pop(self._file, None) is not None

        if not self._world.operate(f"unlink {self._file}", remove):
            raise FileNotFoundError(self._file)

    def put(self, data: str, *, exclusive: bool = False) -> None:
        """Write the file, or create it if it does not exist."""

        def write() -> bool:
            if exclusive and self._file in self._world.shared:
                return False
            self._world.shared[self._file] = data
            return True

        if not self._world.operate(f"{'create' if exclusive else 'write'} {self._file}", write):
            raise FileExistsError(self._file)

    def read(self) -> bytes:
        found = self._world.operate(f"read {self._file}", lambda: self._world.shared.get(self._file))
        if found is None:
            raise FileNotFoundError(self._file)
        return str(found).encode()


class SharedRemotePath(SharedPath):
    """The same in an object store: a file appears with its content when it is finished."""

    def create(self) -> Any:
        return SharedFile(self, lambda text: self.put(text))


class SharedFile(BytesIO):
    """A file that is open to write."""

    def __init__(self, path: SharedPath, finish: Callable[[str], None]) -> None:
        super().__init__()
        self.path = path
        self._finish = finish

    def finish(self) -> None:
        self._finish(self.getvalue().decode())

    def __exit__(self, *error: object) -> None:
        if not isinstance(self.path, SharedRemotePath) and error[0] is None:
            self.finish()


def shared_os(world: Execution) -> SimpleNamespace:
    """Take the place of the module `os` in code that creates such files."""

    def create(path: SharedPath, flags: int, mode: int) -> SharedPath:
        path.put("", exclusive=bool(flags & os.O_EXCL))
        return path

    def opened(path: SharedPath, mode: str) -> SharedFile:
        return SharedFile(path, lambda text: path.put(text))

    flags = {name: getattr(os, name) for name in ("O_WRONLY", "O_CREAT", "O_EXCL")}
    return SimpleNamespace(open=create, fdopen=opened, getpid=lambda: world.current.rank, **flags)
