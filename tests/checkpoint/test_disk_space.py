"""A full disk, a quota, no inodes: told before anything is written, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from helpers.processes import Alone
from shoal.checkpoint import AnyPath, Checkpoints, Files
from shoal.checkpoint.commit import store_in
from shoal.checkpoint.filesystem import FreeSpace
from shoal.util.errors import CheckpointError

LARGE = 1 << 22


def save(directory: Path, step: int, size: int, files: Files | None = None) -> Checkpoints:
    checkpoints = Checkpoints(directory, Alone(), files=files)
    checkpoints.save(step, {"weight": torch.zeros(size, dtype=torch.uint8)}, {}, {})
    return checkpoints


class Small(Files):
    """A disk with little room."""

    def __init__(self, size: int | None, files: int | None) -> None:
        self.free = FreeSpace(size, files)
        self.made: list[AnyPath] = []

    def room(self, path: AnyPath) -> FreeSpace:
        return self.free

    def create(self, path: AnyPath) -> BinaryIO:
        self.made.append(path)
        return super().create(path)


@pytest.mark.parametrize(
    ("room", "said"),
    [
        ((LARGE - 1, None), "4,194,304 bytes are needed, 4,194,303 are free (df -h)"),
        ((None, 3), "4 files are needed, 3 are free (df -i)"),
    ],
)
def test_too_little_room_is_told_before_anything_is_written(
    room: tuple[int | None, int | None], said: str, tmp_path: Path
) -> None:
    save(tmp_path, 1, 3)
    files = Small(*room)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, LARGE, files)
    assert said in caught.value.found
    assert str(tmp_path) in caught.value.found
    assert "No space left on device" in caught.value.found
    assert "free space" in caught.value.fix
    assert files.made == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("room", [(None, None), (LARGE, 4)])
def test_enough_room_or_none_that_is_known(room: tuple[int | None, int | None], tmp_path: Path) -> None:
    save(tmp_path, 1, LARGE, Small(*room))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_what_the_system_says_is_free(tmp_path: Path) -> None:
    room = Files().room(tmp_path / "not" / "yet" / "there")
    assert room.bytes is not None
    assert room.bytes <= shutil.disk_usage(tmp_path).total
    assert room.bytes > 0
    # The kernel's own files take nothing and count nothing.
    assert Files().room(Path("/proc/self")) == FreeSpace(None, None)


class Limited(Files):
    """A quota, which only shows when room is reserved."""

    def __init__(self) -> None:
        self.written = 0

    def reserve(self, file: BinaryIO, size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.written += 1
        super().write(file, data)


def test_a_quota_is_told_with_path_and_bytes(tmp_path: Path) -> None:
    save(tmp_path, 1, 3)
    files = Limited()
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, LARGE, files)
    assert "Disk quota exceeded: 4,194," in caught.value.found  # and a header
    assert " bytes are needed" in caught.value.found
    assert f"{tmp_path}/step-2.partial/rank-0.safetensors" in caught.value.found
    assert "quota shows your limit" in caught.value.fix
    assert files.written == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_reserved_is_written_over(tmp_path: Path) -> None:
    """From the beginning."""
    store = store_in(tmp_path, Files())
    record = store.write(1, "file", [b"abc", b"defgh"])
    content = (tmp_path / "step-1.partial" / "file").read_bytes()
    assert content == b"abcdefgh"
    assert record.bytes == 8


def test_a_limit_shows_at_the_reservation(tmp_path: Path) -> None:
    """By a limit of the process, as a disk would: no byte is written before it is known."""
    with file_size_limit(1 << 20), pytest.raises(OSError, match="bytes are needed") as caught:
        store_in(tmp_path, Files()).write(1, "file", [bytes(LARGE)])
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "step-1.partial" / "file").stat().st_size == 0


MOUNTED = """
import errno, sys, time, torch
from pathlib import Path
sys.path[:0] = [{tests!r}]
from helpers.processes import Alone
from shoal.checkpoint import Checkpoints, Files
from shoal.util.errors import CheckpointError

directory = Path({directory!r})
checkpoints = Checkpoints(directory, Alone(), keep=9)

def save(step, megabytes):
    checkpoints.save(step, {{"weight": torch.zeros(megabytes << 20, dtype=torch.uint8)}}, {{}}, {{}})

save(1, 2)
{body}
loaded = checkpoints.restore()
print(loaded.step, sorted(path.name for path in directory.iterdir()))
"""

FULL = """
class Blind(Files):
    def room(self, path):
        found = super().room(path)
        return found._replace(bytes=None) if path == directory else found

for files in (Files(), Blind()):
    checkpoints = Checkpoints(directory, Alone(), keep=9, files=files)
    try:
        save(2, 8)
    except CheckpointError as error:
        print(error.found)
"""

UNABLE = """
def written():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("syscw"))

with (directory / "file").open("xb") as file:
    before = written()
    Files().reserve(file, 1 << 30)
    after = written()
print(after - before, (directory / "file").stat().st_size)
(directory / "file").unlink()
save(2, 2)
"""


def on(mount: str, body: str, tmp_path: Path) -> list[str]:
    """What a script printed that ran with a file system of its own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    tests = str(Path(__file__).parents[1])
    script = MOUNTED.format(tests=tests, directory=str(directory), body=body)
    (tmp_path / "script.py").write_text(script)
    command = f'mount {mount} "$1" && exec "$2" "$3"'
    shell = ["sh", "-c", command, "sh", str(directory), sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(
        ["unshare", "--mount", *shell], capture_output=True, text=True, timeout=100, check=False
    )
    if "not permitted" in done.stderr or "denied" in done.stderr:
        pytest.skip("needs namespaces")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.system
def test_a_small_disk(tmp_path: Path) -> None:
    """By what is free, and where that is not known, by the reservation."""
    counted, reserved, left = on("-t tmpfs -o size=6m tmpfs", FULL, tmp_path)
    assert "8,388,608 bytes are needed" in counted
    assert "rank-0.safetensors" not in counted
    assert re.search(r" 8,38\d,\d+ bytes are needed, [\d,]+ are free on the disk", reserved)
    assert "rank-0.safetensors" in reserved
    assert left == "1 ['step-1']"


@pytest.mark.long
@pytest.mark.system
def test_a_disk_without_inodes(tmp_path: Path) -> None:
    body = "try:\n    save(2, 1)\nexcept CheckpointError as error:\n    print(error.found)"
    said, left = on("-t tmpfs -o size=60m,nr_inodes=8 tmpfs", body, tmp_path)
    assert "4 files are needed" in said
    assert left == "1 ['step-1']"


@pytest.mark.system
def test_a_file_system_that_can_not_reserve(tmp_path: Path) -> None:
    """It is not written full instead, a byte in each block, which for a gigabyte takes long."""
    assert on("-t ramfs ramfs", UNABLE, tmp_path) == ["0 0", "2 ['step-1', 'step-2']"]
