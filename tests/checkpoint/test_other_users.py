"""A run directory on a machine with other users: who may not write there can't keep a run out."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.clocks import ManualClock
from shoal.checkpoint import lock
from shoal.checkpoint.lock import Lock
from shoal.util.errors import CheckpointError

NOBODY, GROUP = 65534, 65533

OTHER = """
import fcntl, os, sys
from pathlib import Path
from shoal.checkpoint.lock import Lock
path, group, flags = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.setgroups([])
os.setgid(group)
os.setuid(65534)
if flags < 0:
    held = Lock(path)
else:
    held = os.open(path, flags)
    fcntl.lockf(held, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""
"""Another user, with the group GROUP, opens a lock with these flags, or as a run does."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that all users may enter."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def another(path: Path, group: int, flags: int = -1) -> Iterator[str]:
    """What another user says who holds the lock in the block, if that user can."""
    command = [sys.executable, "-c", OTHER, str(path), str(group), str(flags)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout.readline()
        yield said if said == "held\n" else said + process.stdout.read()
        process.stdin.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o644, 0o666], ids=str)
def test_who_may_only_read_a_run_does_not_hold_its_lock(before: int | None, folder: Path) -> None:
    path = folder / "lock"
    if before is not None:  # of an earlier version
        path.touch()
        path.chmod(before)
    Lock(path).release()
    assert mode(path) == 0o600
    with another(path, NOBODY, os.O_RDONLY) as said:
        assert "Permission denied" in said
        Lock(path).release()


def test_a_group_that_may_write_the_directory_takes_turns(folder: Path) -> None:
    os.chown(folder, -1, GROUP)
    folder.chmod(0o775)
    path = folder / "lock"
    Lock(path).release()
    assert (mode(path), path.stat().st_gid) == (0o660, GROUP)
    for group, expected in ((GROUP, "held\n"), (NOBODY, "Permission denied")):
        with another(path, group) as said:
            assert expected in said
    path.unlink()
    with another(path, GROUP) as said:
        assert said == "held\n"
        assert (mode(path), path.stat().st_uid, path.stat().st_gid) == (0o660, NOBODY, GROUP)


def test_a_directory_that_all_may_write_has_a_lock_of_its_owner(folder: Path) -> None:
    folder.chmod(0o777)
    path = folder / "lock"
    with another(path, NOBODY) as said:  # who is not in the group of the directory
        assert said == "held\n"
        assert (mode(path), path.stat().st_uid) == (0o600, NOBODY)


def test_who_holds_the_lock_of_an_earlier_version_is_not_taken_for_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "CLOCK", ManualClock())
    path = folder / "lock"
    path.touch()
    path.chmod(0o644)
    with another(path, NOBODY, os.O_RDONLY) as said:
        assert said == "held\n"
        with pytest.raises(CheckpointError) as raised:
            Lock(path)
        assert "only reads lock has locked it" in raised.value.found
        assert f"rm {path}" in raised.value.fix
        path.unlink()
        Lock(path).release()
    assert mode(path) == 0o600
