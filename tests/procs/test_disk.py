"""Disks that fill up, refuse, are purged or lie: the checkpoint before stays, and it is said why."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

import shoal
from hooked import Counted, HookedFiles
from ranks import RankError, Ranks
from shoal import events
from shoal.checkpoint import Checkpoints
from shoal.checkpoint.state import take_apart
from shoal.checkpoint.store import Manifest, Record, Room
from staged import parts

EVERY, UNTIL = 2, 8
NOBODY = 65534
FILES = ("manifest.json", "rank-0.safetensors", "rank-1.safetensors", "state.json")
PAGE = os.sysconf("SC_PAGESIZE")


def nothing(directory: Path, step: int) -> None:
    """A disk that is in order."""


class Refused(HookedFiles):
    """Refuses an operation during the save of one step."""

    def __init__(self, operation: str, code: int, step: int) -> None:
        super().__init__()
        self._operation, self._code, self._step = operation, code, step
        self._within = False

    def at(self, number: int, path: Path | None) -> None:
        if path is not None:
            self._within = path.parent.name == f"step-{self._step}.partial"
        if self._within and self.names[number] == self._operation:
            # As from the system: a call on an open file names none.
            raise OSError(self._code, os.strerror(self._code), path and str(path))


class Unaware(Counted):
    """Does not ask how much room there is: what is too much shows when it is written."""

    def room(self, path: Path) -> Room:
        return Room(None, None)

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
class Failed:
    """A save that failed: what was said, and the step of the checkpoint that was whole then."""

    error: shoal.CheckpointError
    whole: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What an attempt came to on one rank."""

    restored: int | None
    weights: list[Tensor]
    failed: dict[int, Failed]
    told: str


def train(world: shoal.World, training: Training) -> Ended:
    """Save at every second step, and go on where that fails."""
    step, data = parts(world, None)
    ema = shoal.EMA(step.model, decay=0.5)
    kept = training.directory / "checkpoints"
    files = training.files if training.victim in (None, world.rank) else Counted()
    failed: dict[int, Failed] = {}
    told = io.StringIO()
    with (
        contextlib.redirect_stdout(told),
        shoal.Run(training.directory, step, data, state={"ema": ema}) as run,
    ):
        run.checkpoints = Checkpoints(kept, world, files=files)
        restored = run.restore()
        for batch in data.epochs(9):
            step(batch)
            ema.update()
            run.tick()
            world.log({"rate": step.optimizer.param_groups[0]["lr"]})
            run.note("batch", {"text": "." * PAGE})  # a record that needs room, too
            if step.number % EVERY == 0:
                if world.first:
                    training.disturb(training.directory, step.number)
                try:
                    run.save()
                except shoal.CheckpointError as error:
                    whole = Checkpoints(kept, world).restore()
                    assert whole is not None
                    failed[step.number] = Failed(error=error, whole=whole.step)
            if step.number == UNTIL:
                break
    values = [*step.model.parameters(), *ema.state_dict()["averages"].values()]
    return Ended(
        restored=None if restored is None else restored.step,
        weights=[value.detach().clone() for value in values],
        failed=failed,
        told=told.getvalue(),
    )


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run with the checkpoints of steps 4, 6 and 8, and its end."""

    directory: Path
    ended: list[Ended]

    def assert_same(self, found: list[Ended]) -> None:
        for ours, theirs in zip(found, self.ended, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.weights, theirs.weights, strict=True))


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


@pytest.mark.parametrize(
    ("code", "operation", "victim", "words", "fix"),
    [
        (errno.EDQUOT, "write", 1, "Disk quota exceeded", "quota shows your limit"),
        pytest.param(
            errno.ENOSPC, "sync", 0, "No space left on device", "free space", marks=pytest.mark.full
        ),
        pytest.param(errno.EIO, "sync", 1, "Input/output error", "in order", marks=pytest.mark.full),
        pytest.param(errno.EIO, "create", 0, "Input/output error", "in order", marks=pytest.mark.full),
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


def purge(*relative: str) -> Callable[[Path], None]:
    def remove(directory: Path) -> None:
        for name in relative:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


NEWEST = f"checkpoints/step-{UNTIL}"
HALVES = [tuple(f"{NEWEST}/{name}" for name in FILES[start : start + 2]) for start in (0, 2)]


@pytest.mark.parametrize(
    ("purged", "restored", "told"),
    [
        pytest.param(purge(""), None, None, id="the run", marks=pytest.mark.full),
        pytest.param(purge("checkpoints"), None, None, id="all checkpoints"),
        pytest.param(purge(NEWEST), 6, None, id="the newest", marks=pytest.mark.full),
        pytest.param(purge(*HALVES[0]), 6, "manifest.json is missing", id="half of the newest"),
        pytest.param(
            purge(*HALVES[1]),
            6,
            r"state\.json is missing \(seen by rank 0\)",
            id="the other half",
            marks=pytest.mark.full,
        ),
    ],
)
def test_scratch_purged_between_restarts(
    purged: Callable[[Path], None],
    restored: int | None,
    told: str | None,
    two: Ranks,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    directory = shutil.copytree(undisturbed.directory, tmp_path / "run")
    purged(directory)
    found = two.call(train, Training(directory=directory))
    assert [ended.restored for ended in found] == [restored, restored]
    undisturbed.assert_same(found)
    said = re.findall(r"^skipped (.*)", found[0].told, re.MULTILINE)
    assert len(said) == (told is not None)
    assert told is None or re.fullmatch(rf"{directory}/{NEWEST}: {told}", said[0])
    assert [ended.restored for ended in two.call(train, Training(directory=directory))] == [UNTIL] * 2


@pytest.mark.full
def test_scratch_purged_of_some_file_of_each_checkpoint(
    two: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = shutil.copytree(undisturbed.directory, tmp_path / "run")
    for step, name in zip((8, 6, 4), FILES, strict=False):
        (directory / f"checkpoints/step-{step}" / name).unlink()
    before = sorted(directory.rglob("step-*/*"))
    for refused in two.attempt(train, Training(directory=directory)):
        assert isinstance(refused, RankError)
        assert isinstance(refused.error, shoal.CheckpointError), refused.text
        found = r"step-8: manifest.*missing.*; step-6: rank-0.*missing.*; step-4: rank-1.*missing"
        assert re.search(found, refused.error.found)
        assert f"rm -r {directory}/checkpoints/step-*" in refused.error.fix
    assert sorted(directory.rglob("step-*/*")) == before


def load(world: shoal.World, directory: Path) -> tuple[int, str, tuple[str, ...]]:
    """The step of the newest whole checkpoint, a digest of its tensors, and what was passed over."""
    loaded = Checkpoints(directory / "checkpoints", world).restore()
    assert loaded is not None
    digest = hashlib.sha256()
    for name, tensor in sorted(take_apart(loaded.state).tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    reasons = tuple(f"{one.path.name}: {one.reason}" for one in loaded.skipped)
    return loaded.step, digest.hexdigest(), reasons


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def harms(content: bytes, marker: Path) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file."""
    size = len(content)
    for length in (0, 1, 8, size // 2, size - 1):
        yield f"{length} bytes of it", content[:length]
    yield "one byte more", content + b"\0"
    for bit, at in enumerate((0, 7, 8, 40, size // 4, size // 2, 3 * size // 4, size - 1)):
        yield (
            f"bit {bit} of byte {at}",
            content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :],
        )
    yield "a pickle", pickle.dumps(Hostile(marker))
    yield "zeros", bytes(size)
    yield "nothing", None


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_whatever_becomes_of_a_file(
    name: str, two: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = shutil.copytree(undisturbed.directory, tmp_path / "run")
    marker = tmp_path / "unpickled"
    newest = two.call(load, directory)
    path = directory / NEWEST / name
    content = path.read_bytes()
    shutil.move(path.parent, tmp_path / "aside")
    before = two.call(load, directory)
    shutil.move(tmp_path / "aside", path.parent)
    assert (newest[0][0], before[0][0]) == (8, 6)
    for harm, harmed in harms(content, marker):
        path.unlink()
        if harmed is not None:
            path.write_bytes(harmed)
        for found in two.call(load, directory):
            assert found[:2] == before[0][:2], harm
            [reason] = found[2]
            assert reason.startswith(f"step-8: {name} "), f"{harm}: {reason}"
        path.write_bytes(content)
    assert not marker.exists()
    assert two.call(load, directory) == newest


def forge(path: Path, content: bytes) -> None:
    """Replace a file of a checkpoint, and have its manifest agree."""
    path.write_bytes(content)
    written = path.parent / "manifest.json"
    manifest = Manifest.parse(written.read_bytes())
    record = Record(len(content), hashlib.sha256(content).hexdigest())
    written.write_bytes(replace(manifest, files={**manifest.files, path.name: record}).render())


@pytest.mark.full
def test_a_forged_table_without_a_tensor_is_refused_by_all_ranks(
    two: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = shutil.copytree(undisturbed.directory, tmp_path / "run")
    path = directory / NEWEST / "state.json"
    content = json.loads(path.read_bytes())
    name = next(name for name in content["tensors"] if name.endswith("head.weight"))
    del content["tensors"][name]
    forge(path, json.dumps(content).encode())
    for refused in two.attempt(load, directory):
        assert isinstance(refused, RankError)
        assert isinstance(refused.error, shoal.CheckpointError), refused.text
        assert f"{directory}/{NEWEST}" in refused.error.given
        assert name in refused.error.found


@pytest.mark.full
@pytest.mark.parametrize("name", FILES[1:])
def test_a_pickle_with_a_forged_manifest(
    name: str, two: Ranks, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    directory = shutil.copytree(undisturbed.directory, tmp_path / "run")
    marker = tmp_path / "unpickled"
    content = pickle.dumps(Hostile(marker))
    forge(directory / NEWEST / name, content)
    for refused in two.attempt(load, directory):
        assert isinstance(refused, RankError)
        assert isinstance(refused.error, shoal.CheckpointError), refused.text
        assert f"{directory}/{NEWEST}" in refused.error.given
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()


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
                steps = [event["step"] for event in events.read(path) if event["event"] == "batch"]
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
