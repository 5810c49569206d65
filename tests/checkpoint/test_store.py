"""What a checkpoint survives: damage, kills, other people's directories."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from helpers.checkpoint_files import Alone, Hostile, flip, forge, names, truncate
from shoal.checkpoint import AnyPath, Checkpoints, Files, RestoredCheckpoint
from shoal.checkpoint.disk_and_remote import store_in
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


def next_attempt(directory: Path, step: int, keep: int) -> int | None:
    """A new process, which has seen nothing, restores and saves; the step that it restored."""
    checkpoints = Checkpoints(directory, Alone(), keep=keep)
    loaded = checkpoints.restore()
    checkpoints.save(step, {"weight": torch.full((3,), float(step))}, {}, {"step": step})
    return None if loaded is None else loaded.step


def test_the_newest_comes_back(tmp_path: Path) -> None:
    for directory in (tmp_path / "never-made", tmp_path):
        assert Checkpoints(directory, Alone()).restore() is None
    save(tmp_path, 2, 10, 9)
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.path, loaded.skipped) == (10, tmp_path / "step-10", ())
    assert names(loaded.path) == FILES


def harms(content: bytes, marker: Path) -> Iterator[tuple[str, bytes | None]]:
    """What may become of a file."""
    size = len(content)
    for length in (0, 1, 8, size // 2, size - 1):
        yield f"{length} bytes of it", content[:length]
    yield "one byte more", content + b"\0"
    for bit, at in enumerate((0, 7, 8, 40, size // 4, size // 2, 3 * size // 4, size - 1)):
        flipped = bytes([content[at] ^ 1 << bit])
        yield f"bit {bit} of byte {at}", content[:at] + flipped + content[at + 1 :]
    yield "a pickle", pickle.dumps({"weight": Hostile(marker)})
    yield "zeros", bytes(size)
    yield "nothing", None
    yield "a directory", None


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_means_the_previous_one(name: str, tmp_path: Path) -> None:
    run, marker = tmp_path / "run", tmp_path / "unpickled"
    save(run, 1, 2)
    path = run / "step-2" / name
    content = path.read_bytes()
    for harm, harmed in harms(content, marker):
        path.unlink()
        if harmed is not None:
            path.write_bytes(harmed)
        elif harm == "a directory":
            path.mkdir()
        loaded = restore(run)
        assert loaded.step == 1, harm
        [skipped] = loaded.skipped
        assert skipped.path == run / "step-2", harm
        assert skipped.reason.startswith(f"{name} "), f"{harm}: {skipped.reason}"
        if harm != "a directory":
            path.write_bytes(content)
    assert not marker.exists()


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    truncate(tmp_path / "step-1" / "state.json")
    (tmp_path / "step-2" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path, Alone()).restore()
    assert (
        "none is complete: step-2: manifest.json is missing; step-1: state.json has"
        in caught.value.found
    )
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


def test_a_renamed_directory_is_not_taken_for_another_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / "step-5")
    with pytest.raises(CheckpointError, match=r"step-5: its manifest\.json is of step 1"):
        Checkpoints(tmp_path, Alone()).restore()


@pytest.mark.parametrize("name", FILES[1:])
def test_a_pickle_with_a_forged_manifest_is_never_loaded(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    marker = tmp_path / "unpickled"
    content = pickle.dumps({"weight": Hostile(marker)})
    forge(tmp_path / "step-1", name, content)
    with pytest.raises(CheckpointError):
        Checkpoints(tmp_path, Alone()).restore()
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()


def test_retention_keeps_the_newest_verified_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_what_nobody_verified_does_not_count(tmp_path: Path) -> None:
    """A new process removes nothing until it has seen enough whole ones."""
    save(tmp_path, 1, 2, 3, 4, 5)
    flip(tmp_path / "step-5" / "state.json")
    assert next_attempt(tmp_path, 6, keep=2) == 4
    assert names(tmp_path) == ["step-4", "step-5", "step-6"]
    flip(tmp_path / "step-6" / "state.json")
    assert restore(tmp_path).step == 4
    save(tmp_path / "other", 1, 2)
    save(tmp_path / "other", 3, keep=2)
    assert names(tmp_path / "other") == ["step-1", "step-2", "step-3"]


def test_attempts_that_save_once_each_keep_no_more(tmp_path: Path) -> None:
    for step in range(1, 7):  # preempted again and again
        next_attempt(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-4", "step-5", "step-6"]


@pytest.mark.parametrize("harm", [truncate, Path.unlink])
def test_an_incomplete_one_does_not_count_as_kept(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    save(tmp_path, 1, 2, 3, 4)
    harm(tmp_path / "step-3" / "state.json")
    next_attempt(tmp_path, 5, keep=3)
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


def test_the_manifest_alone_commits(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    partial = tmp_path / "step-2.partial"
    (tmp_path / "step-2").rename(partial)
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.path) == (2, tmp_path / "step-2")
    (tmp_path / "step-2").rename(partial)
    truncate(partial / "manifest.json")
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.skipped) == (1, ())
    assert names(tmp_path) == ["step-1"]


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


@pytest.mark.parametrize("damaged", ["step-1", "step-1.partial"])
def test_a_newcomer_replaces_a_damaged_one_and_no_whole_one(damaged: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.partial")
    flip(tmp_path / damaged / "state.json")
    loaded = restore(tmp_path)
    assert (loaded.step, loaded.skipped) == (1, ())
    assert names(tmp_path) == ["step-1"]


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
