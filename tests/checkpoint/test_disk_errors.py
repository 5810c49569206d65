"""Disks that fill up or refuse: the checkpoint before stays, training goes on, and it is said why."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shoal
from helpers.failing_disk import (
    NEWEST,
    PAGE,
    UNTIL,
    Ended,
    Refused,
    Training,
    Unaware,
    Undisturbed,
    load,
    train,
)
from helpers.kill_in_save import Counted
from helpers.ranks import RankError, Ranks
from shoal.telemetry import events

pytestmark = pytest.mark.processes

NOBODY = 65534


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(directory=directory, ended=two.call(train, Training(directory=directory)))


def assert_failed_once(found: list[Ended], words: str, fix: str) -> None:
    """At step 4, on all ranks alike, with the checkpoint of step 2 whole; then no more.

    `words` are what is said after the rank.
    """
    for ended in found:
        assert ended.failed.keys() == {4}
        failed = ended.failed[4]
        assert failed.whole == 2
        assert str(failed.error) == str(found[0].failed[4].error)
        assert re.match(rf"rank \d: \[Errno \d+\] {words}", failed.error.found)
        assert fix in failed.error.fix


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "operation", "victim", "words", "fix"),
    [
        (errno.EDQUOT, "write", 1, "Disk quota exceeded", "quota shows your limit"),
        pytest.param(
            errno.ENOSPC, "sync", 0, "No space left on device", "free space", marks=pytest.mark.full
        ),
        pytest.param(errno.EIO, "sync", 1, "Input/output error", "file system", marks=pytest.mark.full),
        pytest.param(
            errno.EIO,
            "create",
            0,
            "Input/output error",
            "check the file system",
            marks=pytest.mark.full,
        ),
    ],
)
def test_training_goes_on_after_a_save_that_failed(
    code: int,
    operation: str,
    victim: int,
    words: str,
    fix: str,
    two: Ranks,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    files = Refused(operation, code, 4)
    found = two.call(train, Training(directory=tmp_path, victim=victim, files=files))
    assert_failed_once(found, rf"{words}: .*step-4\.partial", fix)
    undisturbed.assert_same(found)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-2",
        "step-6",
        "step-8",
    ]


def lock_and_unlock(directory: Path, step: int) -> None:
    """Nobody may write at step 4; everybody whose directory it is may at all others."""
    (directory / "checkpoints").chmod(0o555 if step == 4 else 0o755)


def train_as_ordinary_user(world: shoal.World, training: Training) -> Ended:
    """Nothing holds root back from writing; for a while this process is somebody else."""
    if os.geteuid() != 0:
        return train(world, training)
    os.seteuid(NOBODY)
    try:
        return train(world, training)
    finally:
        os.seteuid(0)


def test_a_directory_that_may_no_longer_be_written(two: Ranks, undisturbed: Undisturbed) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        directory.mkdir()
        if os.geteuid() == 0:
            Path(name).chmod(0o755)
            os.chown(directory, NOBODY, NOBODY)
        training = Training(directory=directory, disturb=lock_and_unlock)
        found = two.call(train_as_ordinary_user, training)
        assert_failed_once(
            found, rf"Permission denied: '{directory}/checkpoints/step-4\.partial'", "ls -ld"
        )
        undisturbed.assert_same(found)
        (directory / "checkpoints").chmod(0o555)
        for refused in two.attempt(train_as_ordinary_user, training):
            assert isinstance(refused, RankError)
            assert isinstance(refused.error, shoal.CheckpointError), refused.text
            assert f"{directory}/checkpoints" in refused.error.given
            assert "Permission denied" in refused.error.found
        assert two.call(load, directory)[0] == two.call(load, undisturbed.directory)[0]


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A small file system of its own; what is given mounts it anew with other options."""

    def mount(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", *given, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )

    folder.mkdir()
    if os.geteuid() != 0 or (done := mount(options)).returncode:
        pytest.skip("needs root" if os.geteuid() else f"needs root that may mount: {done.stderr}")
    try:
        yield lambda other: mount(f"remount,{other}").check_returncode()
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(what: str, left: int, directory: Path, step: int) -> None:
    """Before the save of step 4 leave so many pages, or files; give all back before the next."""
    filler = directory.parent / "filler"
    if step != 4:
        shutil.rmtree(filler, ignore_errors=True)
        return
    filler.mkdir()
    if what == "pages":
        # One at a time: the other rank may be writing its events.
        with (filler / "zeros").open("wb", buffering=0) as file:
            while os.statvfs(filler).f_bavail * os.statvfs(filler).f_frsize > left * PAGE:
                file.write(bytes(PAGE))
    else:
        for number in range(os.statvfs(filler).f_favail - left):
            (filler / str(number)).touch()


@pytest.mark.system
@pytest.mark.parametrize(
    ("what", "foreseen"), [("pages", True), ("pages", False), ("files", True), ("files", False)]
)
def test_a_disk_that_is_full(
    what: str, foreseen: bool, two: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A real one, of 2 MiB or 60 files, on which events and curves are written as well."""
    sizes = [path.stat().st_size for path in (undisturbed.directory / NEWEST).iterdir()]
    needed = len(sizes) + 1 if what == "files" else sum(-(-size // PAGE) for size in sizes)
    said = "No space left on device: "
    if foreseen:
        said += rf"[\d,]+ {'files' if what == 'files' else 'bytes'} are needed, [\d,]+ are free \(df -"
    with disk(tmp_path / "disk", "size=2m" if what == "pages" else "nr_inodes=60"):
        for left in range(0, needed // 4 if foreseen else needed, 1 if what == "files" else 3):
            training = Training(
                directory=tmp_path / "disk" / f"run-{left}",
                disturb=functools.partial(fill_up, what, left),
                files=Counted() if foreseen else Unaware(),
            )
            found = two.call(train, training)
            kept = re.escape(f"{training.directory}/checkpoints")
            assert_failed_once(found, f"{said}.*'{kept}", "free space")
            undisturbed.assert_same(found)
            newest, expected = (two.call(load, each.directory)[0] for each in (training, undisturbed))
            assert newest[:2] == expected[:2]
            for path in (training.directory / "events").iterdir():
                steps = [
                    event["step"] for event in events.read_events(path) if event["event"] == "batch"
                ]
                assert steps == [*range(1, UNTIL + 1)]
            shutil.rmtree(training.directory)


@pytest.mark.system
def test_a_disk_that_is_read_only(two: Ranks, undisturbed: Undisturbed, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "size=2m") as remount:
        directory = shutil.copytree(undisturbed.directory, tmp_path / "disk" / "run")
        remount("ro")
        for refused in two.attempt(train, Training(directory=directory)):
            assert isinstance(refused, RankError)
            assert isinstance(refused.error, shoal.CheckpointError), refused.text
            assert f"{directory}/checkpoints" in refused.error.given
            assert "Read-only file system" in refused.error.found
            assert "not mounted read-only" in refused.error.fix
        assert two.call(load, directory) == two.call(load, undisturbed.directory)
