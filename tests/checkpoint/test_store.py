"""What a checkpoint survives: damage, kills, other people's directories."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.processes import Alone
from shoal.checkpoint import AnyPath, Checkpoints, Files, RestoredCheckpoint
from shoal.checkpoint.commit import store_in
from shoal.checkpoint.store import DamageError, FileRecord, Manifest
from shoal.util.errors import CheckpointError

FILES = ["manifest.json", "rank-0.safetensors", "state.json"]


def save(directory: Path, *steps: int, keep: int = 10, files: Files | None = None) -> Checkpoints:
    checkpoints = Checkpoints(directory, Alone(), keep=keep, files=files)
    for step in steps:
        checkpoints.save(step, {"weight": torch.full((3,), float(step))}, {}, {"step": step})
    return checkpoints


def restore(directory: Path) -> RestoredCheckpoint:
    loaded = Checkpoints(directory, Alone()).restore()
    assert loaded is not None
    assert loaded.state["weight"].tolist() == [loaded.step] * 3
    assert loaded.info == {"step": loaded.step}
    return loaded


def names(directory: AnyPath) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_nothing_yet(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "never-made", Alone()).restore() is None
    assert Checkpoints(tmp_path, Alone()).restore() is None


def test_the_newest_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 2, 10, 9)
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.path, loaded.skipped) == (10, tmp_path / "step-10", ())
    assert names(loaded.path) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, empty, flip, Path.unlink, replace_by_directory])
def test_a_damaged_file_means_the_previous_one(
    name: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    harm(tmp_path / "step-2" / name)
    loaded = restore(tmp_path)
    assert loaded.step == 1
    [skipped] = loaded.skipped
    assert skipped.path == tmp_path / "step-2"
    assert name in skipped.reason


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    truncate(tmp_path / "step-1" / "state.json")
    (tmp_path / "step-2" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, Alone()).restore()
    assert "step-2: manifest.json is missing; step-1: state.json has" in caught.value.found
    assert f"rm -r {tmp_path}/step-*" in caught.value.fix


def test_any_altered_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    raw = (tmp_path / "step-1" / "manifest.json").read_bytes()
    assert Manifest.parse(raw).step == 1
    for position in range(len(raw)):
        for bit in (1, 32):
            altered = bytearray(raw)
            altered[position] ^= bit
            with pytest.raises(DamageError):
                Manifest.parse(bytes(altered))
        with pytest.raises(DamageError):
            Manifest.parse(raw[:position])


def test_a_manifest_of_the_future_is_not_guessed_at(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-2" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    [skipped] = restore(tmp_path).skipped
    assert "format version 2, this Shoal reads 1" in skipped.reason


def test_a_manifest_may_not_point_elsewhere() -> None:
    raw = Manifest(1, 1, None, {"../elsewhere": FileRecord(0, "")}).render()
    with pytest.raises(DamageError):
        Manifest.parse(raw)


def test_a_renamed_directory_is_not_taken_for_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-5")
    with pytest.raises(CheckpointError, match=r"step-5: its manifest\.json is of step 1"):
        Checkpoints(tmp_path, Alone()).restore()


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", [False, True])
def test_a_pickle_is_never_loaded(name: str, forged: bool, tmp_path: Path) -> None:
    save(tmp_path, 1)
    marker = tmp_path / "unpickled"
    content = pickle.dumps({"weight": Hostile(marker)})
    path = tmp_path / "step-1" / name
    manifest = Manifest.parse((tmp_path / "step-1" / "manifest.json").read_bytes())
    path.write_bytes(content)
    if forged and name != "manifest.json":
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        forgery = replace(manifest, files={**manifest.files, name: record})
        (tmp_path / "step-1" / "manifest.json").write_bytes(forgery.render())
    with pytest.raises(CheckpointError):
        Checkpoints(tmp_path, Alone()).restore()
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()


def test_retention_keeps_the_newest_verified_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_what_nobody_verified_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    flip(tmp_path / "step-5" / "state.json")
    # A new process has seen nothing: it may remove nothing until it has seen two whole ones.
    checkpoints = Checkpoints(tmp_path, Alone(), keep=2)
    loaded = checkpoints.restore()
    assert loaded is not None
    assert loaded.step == 4
    assert len(names(tmp_path)) == 5
    checkpoints.save(6, {"weight": torch.full((3,), 6.0)}, {}, {"step": 6})
    assert names(tmp_path) == ["step-4", "step-5", "step-6"]
    flip(tmp_path / "step-6" / "state.json")
    assert restore(tmp_path).step == 4


def test_an_unverified_old_one_is_not_removed_for_lack_of_others(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def test_attempts_that_save_once_each_keep_no_more(tmp_path: Path) -> None:
    for step in range(1, 7):  # preempted again and again
        checkpoints = Checkpoints(tmp_path, Alone(), keep=3)
        checkpoints.restore()
        checkpoints.save(step, {"weight": torch.full((3,), float(step))}, {}, {"step": step})
    assert names(tmp_path) == ["step-4", "step-5", "step-6"]


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_an_incomplete_one_does_not_count_as_kept(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    save(tmp_path, 1, 2, 3, 4)
    harm(tmp_path / "step-3" / "state.json")
    checkpoints = Checkpoints(tmp_path, Alone(), keep=3)
    checkpoints.restore()
    checkpoints.save(5, {"weight": torch.full((3,), 5.0)}, {}, {"step": 5})
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]


def test_beside_the_others_the_last_one_is_kept(tmp_path: Path) -> None:
    best = save(tmp_path / "checkpoints", 1).sibling("best")
    for step in (5, 4):  # the attempt that saved 5 was killed
        best.save(step, {}, {}, {})
    assert names(tmp_path / "best") == ["step-4"]
    assert names(tmp_path / "checkpoints") == ["step-1"]


def test_a_damaged_step_is_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-2" / "rank-0.safetensors")
    save(tmp_path, 2)
    assert restore(tmp_path).skipped == ()
    assert names(tmp_path) == ["step-1", "step-2"]


def test_an_uncommitted_directory_does_not_exist(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / "step-2.partial")
    truncate(tmp_path / "step-2.partial" / "manifest.json")
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.skipped) == (1, ())
    assert names(tmp_path) == ["step-1"]


def test_the_manifest_alone_commits(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-2").rename(tmp_path / "step-2.partial")
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.path) == (2, tmp_path / "step-2")


class NoRename(Files):
    def rename(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))


def test_without_rename_a_checkpoint_is_as_good(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, 2, files=NoRename())
    assert names(tmp_path) == ["step-1.partial", "step-2.partial"]
    loaded = checkpoints.restore()
    assert loaded is not None
    assert loaded.path == tmp_path / "step-2.partial"
    # It can't be replaced there, and must not be lost by the attempt.
    with pytest.raises(CheckpointError, match=r"step-2\.partial"):
        save(tmp_path, 2, files=NoRename())
    assert restore(tmp_path).step == 2


def test_a_damaged_newcomer_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.partial")
    flip(tmp_path / "step-1.partial" / "state.json")
    assert restore(tmp_path).step == 1
    assert names(tmp_path) == ["step-1"]


def test_a_whole_newcomer_replaces(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "old")
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-1.partial")
    (tmp_path / "old").rename(tmp_path / "step-1")
    flip(tmp_path / "step-1" / "state.json")
    assert restore(tmp_path).skipped == ()


def test_a_manifest_that_can_not_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = tmp_path / "step-2.partial"
    (partial / "manifest.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step-2\.partial/manifest\.json"):
        save(tmp_path, 3)
    assert partial.exists()


def test_leftovers_of_one_step_in_every_form(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for form in ("step-1.partial", "step-1.trash"):
        shutil.copytree(tmp_path / "step-1", tmp_path / form)
    flip(tmp_path / "step-1.partial" / "state.json")
    save(tmp_path, 1)
    assert restore(tmp_path).skipped == ()
    assert names(tmp_path) == ["step-1"]


def test_reading_does_not_need_to_write(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-2.partial")
    (tmp_path / "step-3.partial").mkdir()

    class ReadOnly(NoRename):
        def remove_directory(self, path: AnyPath) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    loaded = Checkpoints(tmp_path, Alone(), files=ReadOnly()).restore()
    assert loaded is not None
    # Its manifest was written later than that of step-2.
    assert loaded.path == tmp_path / "step-2.partial"
    assert names(tmp_path) == ["step-1", "step-2", "step-2.partial", "step-3.partial"]


def test_what_can_not_be_removed_does_not_stop_a_run(tmp_path: Path) -> None:
    class NoUnlink(Files):
        def unlink(self, path: AnyPath) -> None:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.warns(UserWarning, match="an old checkpoint can't be removed"):
        save(tmp_path, 1, 2, keep=1, files=NoUnlink())
    assert restore(tmp_path).step == 2


def test_what_somebody_has_open_stays_in_nobodys_way(tmp_path: Path) -> None:
    class Held(Files):
        """NFS: what is open elsewhere gets another name, by which it can't be removed."""

        def unlink(self, path: AnyPath) -> None:
            assert isinstance(path, Path)
            if path.name == ".nfs1":
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            if path.name == "state.json":
                path.rename(path.with_name(".nfs1"))
            else:
                super().unlink(path)

    with pytest.warns(UserWarning, match="an old checkpoint can't be removed"):
        save(tmp_path, 1, 2, keep=1, files=Held())
    save(tmp_path, 3, files=Held())
    assert names(tmp_path) == ["step-1.trash", "step-2", "step-3"]
    assert restore(tmp_path).step == 3
    assert names(tmp_path) == ["step-2", "step-3"]


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    others = ["events", "step-", "step-01", "step-1.old", "step-x.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    save(tmp_path, 1, 2, keep=1)
    assert names(tmp_path) == sorted([*others, "step-2"])


def test_an_unwritable_directory_is_known_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path / "file" / "run", Alone()).check()
    assert str(tmp_path / "file" / "run") in str(caught.value)
    Checkpoints(tmp_path / "new" / "run", Alone()).check()
    assert names(tmp_path / "new" / "run") == []


def test_keep_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        Checkpoints(tmp_path, Alone(), keep=0)


def test_a_full_disk_is_given_back(tmp_path: Path) -> None:
    class Full(Files):
        def sync_directory(self, path: AnyPath) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        save(tmp_path, 2, files=Full())
    assert "free space" in caught.value.fix
    assert names(tmp_path) == ["step-1"]


def test_records_are_of_what_was_written(tmp_path: Path) -> None:
    record = store_in(tmp_path, Files()).write(3, "some", [b"ab", memoryview(b"c"), b""])
    content = (tmp_path / "step-3.partial" / "some").read_bytes()
    assert content == b"abc"
    assert record == FileRecord(3, hashlib.sha256(b"abc").hexdigest())


def test_a_manifest_is_json_that_anyone_reads(tmp_path: Path) -> None:
    save(tmp_path, 1)
    content = json.loads((tmp_path / "step-1" / "manifest.json").read_text())
    assert content["format"] == "shoal checkpoint"
    assert content["manifest"]["step"] == 1
    for name, record in content["manifest"]["files"].items():
        raw = (tmp_path / "step-1" / name).read_bytes()
        assert record == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
