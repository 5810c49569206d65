"""Storms of real faults: the end is that of the undisturbed run, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import wait_for
from shoal.tools.chaos import containment
from shoal.util.errors import LaunchError

pytestmark = [pytest.mark.processes, pytest.mark.system]

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    return folder


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "shoal", "chaos", "--json", *options]


def storm(home: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        command(*options), cwd=home, capture_output=True, text=True, check=False, timeout=570
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_a_storm_changes_nothing_and_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = set(Path("/dev/shm").iterdir())
    code, found = storm(
        home,
        "--faults",
        "kill,kill-in-save,kill-in-backward,kill-all,disk-full",
        "--count",
        "5",
        "train.py",
    )
    assert code == 0, found
    assert found["end"] == found["undisturbed"]
    happened = {fault["kind"] for fault in found["faults"] if fault["seconds"] is not None}
    assert {"kill", "kill-in-backward", "kill-all", "disk-full"} <= happened
    noticed = {fault["kind"]: (fault["noticed_by"], fault["message"]) for fault in found["faults"]}
    assert noticed["kill-all"][0] == "scheduler"
    assert "SIGKILL" in noticed["kill"][1]
    assert "SIGKILL" in noticed["kill-in-backward"][1]
    assert "No space left" in noticed["disk-full"][1]
    assert found["taken"] >= found["steps"]
    assert found["attempts"] >= 3
    assert [path.name for path in home.iterdir()] == ["train.py"]
    assert set(Path("/dev/shm").iterdir()) <= before
    assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_a_storm_that_fails_is_shrunk_to_the_faults_that_matter(home: Path) -> None:
    options = ("--faults", "stop,kill", "--count", "2", "--seed", "1")
    code, found = storm(home, *options, "train.py", "--defect", "--epochs", "2")
    assert code == 1
    assert "differ" in found["problem"]
    assert [fault["kind"] for fault in found["faults"]] == ["kill"]


FILL_WHILE_WRITING = """
import subprocess, threading
from shoal.tools.chaos.containment import SCRATCH, StormDisk

subprocess.run(["mount", "-t", "tmpfs", "tmpfs", SCRATCH], check=True)
disk = StormDisk(SCRATCH / "storm-disk")
disk.mount()
ended = threading.Event()

def write():
    with open(disk.path / "growing", "wb", buffering=0) as file:
        while not ended.is_set():
            try:
                file.write(bytes(4096))
            except OSError:
                file.truncate(0)

threads = [threading.Thread(target=write, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    disk.fill()
    disk.restore()
    disk.fill_inodes()
    disk.restore()
ended.set()
for thread in threads:
    thread.join()
disk.fill()
try:
    (disk.path / "more").write_bytes(bytes(1 << 20))
except OSError as error:
    print(error.strerror)
disk.unmount()
"""


def test_a_disk_is_filled_while_others_write_on_it() -> None:
    """A rank may write between the measurement of the disk and the new limit."""
    inside = containment.contain([sys.executable, "-c", FILL_WHILE_WRITING])
    done = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "No space left on device\n"


@pytest.fixture
def running(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command("train.py", "--epochs", "500"), cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def temporary_mounts() -> list[str]:
    """Return the mounts of a kind that a storm makes; other tests make others."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if " tmpfs " in line]


def test_a_killed_command_leaves_nothing(home: Path, running: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: len(psutil.Process(running.pid).children(recursive=True)) >= 4, 300)
    children = psutil.Process(running.pid).children(recursive=True)
    before = temporary_mounts()
    running.send_signal(signal.SIGKILL)
    running.wait()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    assert temporary_mounts() == before
    assert [path.name for path in home.iterdir()] == ["train.py"]


def test_faults_that_can_not_be_contained_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("setpriv", "mount", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'unshare failed: not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LaunchError, match="not permitted"):
        containment.contain(["true"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="missing"):
        containment.contain(["true"])
