"""File operations of a save, counted, and ended by SIGKILL at one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import BinaryIO

from shoal.checkpoint import AnyPath, Files


class HookedFiles(Files):
    """Calls `at` before each operation; a write is done half before."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def at(self, number: int, path: AnyPath | None) -> None:
        raise NotImplementedError

    def _count(self, name: str, path: AnyPath | None = None) -> None:
        self.names.append(name)
        self.at(len(self.names) - 1, path)

    def make_directory(self, path: AnyPath) -> None:
        self._count("make_directory", path)
        super().make_directory(path)

    def create(self, path: AnyPath) -> BinaryIO:
        self._count("create", path)
        return super().create(path)

    def reserve(self, file: BinaryIO, size: int) -> None:
        self._count("reserve")
        super().reserve(file, size)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        half = len(data) // 2
        super().write(file, data[:half])
        file.flush()
        self._count("write")
        super().write(file, data[half:])

    def sync(self, file: BinaryIO) -> None:
        self._count("sync")
        super().sync(file)

    def sync_directory(self, path: AnyPath) -> None:
        self._count("sync_directory", path)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", source)
        super().rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        self._count("unlink", path)
        super().unlink(path)

    def remove_directory(self, path: AnyPath) -> None:
        self._count("remove_directory", path)
        super().remove_directory(path)


class Counted(HookedFiles):
    def at(self, number: int, path: AnyPath | None) -> None:
        pass


class Killed(HookedFiles):
    """Kills this process at one operation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def at(self, number: int, path: AnyPath | None) -> None:
        if number == self._number:
            os.kill(os.getpid(), signal.SIGKILL)
