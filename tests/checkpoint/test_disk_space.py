"""A full disk, a quota, no inodes: told before anything is written, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from helpers.checkpoint_files import Alone, names
from shoal.checkpoint import AnyPath, Checkpoints, Files
from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.filesystem import FreeSpace
from shoal.util.errors import CheckpointError

LARGE = 1 << 22


class Small(Files):
    """A disk with little room, or, with `code`, one where that shows when room is reserved."""

    def __init__(self, size: int | None, files: int | None, code: int = 0) -> None:
        self.free = FreeSpace(size, files)
        self.code = code
        self.made: list[AnyPath] = []

    def room(self, path: AnyPath) -> FreeSpace:
        return self.free

    def create(self, path: AnyPath) -> BinaryIO:
        self.made.append(path)
        return super().create(path)

    def reserve(self, file: BinaryIO, size: int) -> None:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        super().reserve(file, size)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        assert not self.code, "written though there is no room"
        super().write(file, data)


def save(directory: Path, step: int, size: int, files: Files | None = None) -> None:
    state = {"weight": torch.zeros(size, dtype=torch.uint8)}
    Checkpoints(directory, Alone(), files=files).save(step, state, {}, {})


FULL = "No space left on device: "


@pytest.mark.parametrize(
    ("files", "said", "made", "fix"),
    [
        (Small(LARGE - 1, None), rf"{FULL}4,194,304 bytes .* 4,194,303 are free \(df -h\)", "", "free"),
        (Small(None, 3), rf"{FULL}4 files are needed, 3 are free \(df -i\)", "", "free space"),
        (
            Small(None, None, errno.EDQUOT),
            r"Disk quota exceeded: 4,194,\d+ bytes are needed: ",
            "rank-0.safetensors",
            "quota shows your limit",
        ),
        (
            Small(LARGE, 4, errno.ENOSPC),
            rf"{FULL}4,194,\d+ bytes are needed, 4,194,304 are free on the disk",
            "rank-0.safetensors",
            "free space",
        ),
    ],
)
def test_too_little_room_is_told_before_anything_is_written(
    files: Small, said: str, made: str, fix: str, tmp_path: Path
) -> None:
    save(tmp_path, 1, 3)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, LARGE, files)
    assert re.search(said, caught.value.found), caught.value.found
    assert str(tmp_path / "step-2.partial" / made if made else tmp_path) in caught.value.found
    assert fix in caught.value.fix
    assert [path.name for path in files.made] == [made] * bool(made)
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("room", [(None, None), (LARGE, 4)])
def test_enough_room_or_none_that_is_known(room: tuple[int | None, int | None], tmp_path: Path) -> None:
    save(tmp_path, 1, LARGE, Small(*room))
    assert names(tmp_path) == ["step-1"]


def test_what_the_system_says_is_free(tmp_path: Path) -> None:
    room = Files().room(tmp_path / "not" / "yet" / "there")
    assert room.bytes is not None
    assert 0 < room.bytes <= shutil.disk_usage(tmp_path).total
    inodes = os.statvfs(tmp_path).f_files
    assert (room.files or 0) <= inodes
    assert (room.files is None) == (inodes == 0)
    # The kernel's own files take nothing and count nothing.
    assert Files().room(Path("/proc/self")) == FreeSpace(None, None)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_shows_at_the_reservation(tmp_path: Path) -> None:
    """By a limit of the process, as a disk would: no byte is written before it is known."""
    with file_size_limit(1 << 20), pytest.raises(OSError, match="bytes are needed") as caught:
        store_in(tmp_path, Files()).write(1, "file", [bytes(LARGE)])
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "step-1.partial" / "file").stat().st_size == 0
