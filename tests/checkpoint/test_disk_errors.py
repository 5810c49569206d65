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
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import Tensor

import shoal
from helpers.checkpoint_files import names
from helpers.kill_in_save import Counted, HookedFiles
from helpers.pipeline_model import parts
from helpers.ranks import Ranks
from shoal.checkpoint import AnyPath, Checkpoints, Files
from shoal.checkpoint.filesystem import FreeSpace
from shoal.telemetry import events
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes

UNTIL = 8
PAGE = os.sysconf("SC_PAGESIZE")
NOBODY = 65534


def nothing(directory: Path, step: int) -> None:
    """A disk that is in order."""


class Refused(HookedFiles):
    """Refuses an operation during the save of step 4."""

    def __init__(self, operation: str, code: int) -> None:
        super().__init__()
        self._operation, self._code = operation, code
        self._within = False

    def at(self, number: int, path: AnyPath | None) -> None:
        if path is not None:
            self._within = path.parent.name == "step-4.partial"
        if self._within and self.names[number] == self._operation:
            # As from the system: a call on an open file names none.
            raise OSError(self._code, os.strerror(self._code), path and str(path))


class Unaware(Counted):
    """Does not ask how much room there is: what is too much shows when it is written."""

    def room(self, path: AnyPath) -> FreeSpace:
        return FreeSpace(None, None)

    def reserve(self, file: BinaryIO, size: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Training:
    """One attempt. Rank 0 calls `disturb(directory, step)` before each save; `files` are those of rank
    `victim`, or of all."""

    directory: Path
    disturb: Callable[[Path, int], object] = nothing
    victim: int | None = None
    files: HookedFiles = field(default_factory=Counted)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What an attempt came to on one rank.

    `failed` has the error of each save that failed, and the step of the checkpoint that was whole then.
    """

    weights: list[Tensor]
    failed: dict[int, tuple[shoal.CheckpointError, int]]


def train(world: shoal.World, training: Training) -> Ended:
    """Save at every second step, and go on where that fails."""
    step, data = parts(world, None)
    ema = shoal.EMA(step.model, decay=0.5)
    kept = training.directory / "checkpoints"
    files = training.files if training.victim in (None, world.rank) else Counted()
    failed: dict[int, tuple[shoal.CheckpointError, int]] = {}
    with shoal.Run(training.directory, step, data, state={"ema": ema}) as run:
        run.files.checkpoints = Checkpoints(kept, world, files=files)
        run.restore()
        for batch in data.epochs(9):
            step(batch)
            ema.update()
            run.tick()
            world.log({"rate": step.optimizer.param_groups[0]["lr"]})
            run.note("batch", {"text": "." * PAGE})  # a record that needs room, too
            if step.number % 2 == 0:
                if world.is_rank_zero:
                    training.disturb(training.directory, step.number)
                try:
                    run.save()
                except CheckpointError as error:
                    whole = Checkpoints(kept, world).restore()
                    assert whole is not None
                    failed[step.number] = error, whole.step
            if step.number == UNTIL:
                break
    values = [*step.model.parameters(), *ema.state_dict()["averages"].values()]
    return Ended(weights=[value.detach().clone() for value in values], failed=failed)


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run with the checkpoints of steps 4, 6 and 8, and its end."""

    directory: Path
    ended: list[Ended]

    def assert_same(self, found: list[Ended], words: str, fix: str) -> None:
        """A save failed once, and the end is the same.

        At step 4, on all ranks alike, with the checkpoint of step 2 whole. `words` follow the rank.
        """
        for ours, theirs in zip(found, self.ended, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.weights, theirs.weights, strict=True))
            assert ours.failed.keys() == {4}
            error, whole = ours.failed[4]
            assert whole == 2
            assert str(error) == str(found[0].failed[4][0])
            assert re.match(rf"rank \d: \[Errno \d+\] {words}", error.found)
            assert fix in error.fix

    def assert_restored(self, two: Ranks, directory: Path) -> None:
        """What is restored is that of this run."""
        assert all(two.call(load_both, directory, self.directory))


def load_both(world: shoal.World, *directories: Path) -> bool:
    """Whether the latest complete checkpoints have the same step and model."""
    left, right = (Checkpoints(each / "checkpoints", world).restore() for each in directories)
    assert left is not None
    assert right is not None
    models = (each.state["steps"]["step"]["model"] for each in (left, right))
    pairs = zip(*(model.values() for model in models), strict=True)
    return left.step == right.step == UNTIL and all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(2)


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(directory=directory, ended=two.call(train, Training(directory=directory)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "operation", "victim", "words", "fix"),
    [
        (errno.EDQUOT, "write", 1, "Disk quota exceeded", "quota shows your limit"),
        (errno.EIO, "create", 0, "Input/output error", "check the file system"),
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
    training = Training(directory=tmp_path, victim=victim, files=Refused(operation, code))
    undisturbed.assert_same(two.call(train, training), rf"{words}: .*step-4\.partial", fix)
    assert names(tmp_path / "checkpoints") == ["step-2", "step-6", "step-8"]


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
        said = rf"Permission denied: '{directory}/checkpoints/step-4\.partial'"
        undisturbed.assert_same(found, said, "ls -ld")
        (directory / "checkpoints").chmod(0o555)
        for error in two.errors(CheckpointError, train_as_ordinary_user, training):
            assert f"{directory}/checkpoints" in error.given
            assert "Permission denied" in error.found
        undisturbed.assert_restored(two, directory)


@contextlib.contextmanager
def disk(folder: Path, options: str, kind: str = "tmpfs") -> Iterator[Callable[[str], None]]:
    """A small file system of its own; what is given mounts it anew with other options."""

    def mount(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["mount", "-t", kind, "-o", *given, kind, str(folder)],
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
    newest = undisturbed.directory / f"checkpoints/step-{UNTIL}"
    sizes = [path.stat().st_size for path in newest.iterdir()]
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
            undisturbed.assert_same(found, f"{said}.*'{kept}", "free space")
            undisturbed.assert_restored(two, training.directory)
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
        for error in two.errors(CheckpointError, train, Training(directory=directory)):
            assert f"{directory}/checkpoints" in error.given
            assert "Read-only file system" in error.found
            assert "not mounted read-only" in error.fix
        undisturbed.assert_restored(two, directory)


@pytest.mark.system
def test_a_file_system_that_can_not_reserve(tmp_path: Path) -> None:
    """It is not written full instead, a byte in each block, which for a gigabyte takes long."""

    def calls() -> int:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))

    with disk(tmp_path / "disk", "size=1m", "ramfs"):
        with (tmp_path / "disk" / "file").open("xb") as file:
            before = calls()
            Files().reserve(file, 1 << 30)
            assert calls() == before
        assert (tmp_path / "disk" / "file").stat().st_size == 0
