"""Checkpoints at URLs: what is saved comes back; the tools; nobody's secrets; nobody else's files."""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch

import shoal
from helpers.checkpoint_files import Alone, checkpoint, names
from helpers.object_store import NUMBERS, Bucket, Failing, begin, nothing, restored, save, state
from shoal.checkpoint import AnyPath, Checkpoints, Files, async_save, object_store, path_from
from shoal.checkpoint.directory_names import DirectoryName
from shoal.checkpoint.object_store import RemotePath
from shoal.checkpoint.paths import open_file
from shoal.util.errors import CheckpointError


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store in order, now and afterwards."""
    monkeypatch.setattr(Bucket, "before", staticmethod(nothing))
    monkeypatch.setenv("COLUMNS", "200")
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(params=["memory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    return path_from(f"{request.param}://{tmp_path}/run")


def test_what_is_saved_comes_back_and_the_newest_are_kept(place: AnyPath) -> None:
    assert Files().room(place) == (None, None)
    save(begin(place, keep=2), 1, 2, 3, 10)
    assert names(place / "checkpoints") == ["step-10.a1", "step-3.a1"]
    assert restored(place) == (10, 10)
    again = begin(place, keep=2)
    loaded = again.restore()
    assert loaded is not None
    assert str(loaded.path) == f"{place}/checkpoints/step-10.a1"
    assert (loaded.rank_state, loaded.info) == ({"rank": 0}, {"at": 10})
    save(again, 11, 12)
    assert names(place / "checkpoints") == ["step-11.a2", "step-12.a2"]


def test_a_step_is_saved_again_beside_the_one_before(place: AnyPath) -> None:
    first = begin(place)
    save(first, 1, 2)
    assert str(first.where(2)).endswith("/step-2.a1")
    save(first, 2, version=7)
    assert str(first.where(2)).endswith("/step-2.a1.2")
    assert names(place / "checkpoints") == ["step-1.a1", "step-2.a1.2"]
    save(begin(place), 2, version=8)
    assert names(place / "checkpoints") == ["step-1.a1", "step-2.a2"]
    assert restored(place) == (2, 8)


def harm(place: AnyPath, name: str, change: Callable[[bytes], bytes | None]) -> None:
    path = place / name
    assert isinstance(path, RemotePath)
    with open_file(path) as file:
        content = change(file.read())
    path.unlink()
    if content is not None:
        with path.create() as upload:
            upload.write(content)
            upload.finish()


def test_a_damaged_file_means_the_previous_one(place: AnyPath) -> None:
    for step, name in enumerate(("manifest.json", "state.json", "rank-0.safetensors"), 2):
        save(begin(place), 1, step)
        newest = place / "checkpoints" / f"step-{step}.a{step - 1}"
        harm(newest, name, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
        assert restored(place) == (1, 1)
        harm(newest, name, lambda content: content[:-1])
        loaded = Checkpoints(place / "checkpoints", Alone()).restore()
        assert loaded is not None
        assert name in loaded.skipped[0].reason
        harm(newest, name, lambda content: None)
        assert restored(place) == (1, 1)


def test_a_file_in_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "BLOCK", 1000)
    monkeypatch.setattr(async_save, "BLOCK", 300)
    counted = Failing(None, OSError())
    Bucket.before = staticmethod(counted)
    save(begin(path_from(f"bucket://{tmp_path}/run")), 1, version=NUMBERS)
    assert counted.done.count("write") > 0
    assert restored(path_from(f"bucket://{tmp_path}/run")) == (1, NUMBERS)
    assert counted.done.count("read") > counted.done.count("open") / 2


SECRET = "sesame%2Fopen"


def test_a_password_in_a_url_is_shown_nowhere(tmp_path: Path) -> None:
    place = path_from(f"bucket://me:{SECRET}@{tmp_path}/run")
    assert str(place) == f"bucket://***@{tmp_path}/run"
    assert SECRET not in repr(place)
    save(begin(place), 1)

    def refuse(operation: str, key: str) -> None:
        raise PermissionError(f"me:{SECRET} may not, nor may sesame/open, {operation}")

    Bucket.before = staticmethod(refuse)
    with pytest.raises(CheckpointError) as caught:
        restored(place)
    assert "sesame" not in str(caught.value)
    assert "may not, nor may ***" in caught.value.found
    with pytest.raises(CheckpointError) as caught:
        checkpoint("ls", f"bucket://me:{SECRET}@{tmp_path}/run")
    assert "sesame" not in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        shoal.Run("s3://me:sesame/open@bucket/run", None, None)  # type: ignore[arg-type]
    assert "sesame" not in str(caught.value)
    assert "checkpoints='s3://" in caught.value.fix


@pytest.mark.parametrize(
    ("url", "found", "fix"),
    [
        ("s3://bucket/run", "s3fs", "pip install s3fs"),
        ("nothing://bucket/run", "not known", "filesystem-spec"),
        ("simplecache::s3://bucket/run", "chain", "s3://bucket/run"),
        ("memory://run-*/a", "without *", "s3://bucket/run"),
    ],
)
def test_what_can_not_be_had_is_told(
    url: str, found: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError) as caught:
        path_from(url)
    assert url in caught.value.given
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_without_fsspec_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"pip install '\.\[remote\]'"):
        path_from("memory://run")


def test_files_of_this_machine_are_no_remote_ones(tmp_path: Path) -> None:
    """There they are synced and renamed."""
    for given in (f"file://{tmp_path}/run", f"local://{tmp_path}/run", f"{tmp_path}/run"):
        assert path_from(given) == tmp_path / "run"


def test_the_tools_read_them(place: AnyPath, tmp_path: Path) -> None:
    model = {"weight": torch.arange(12.0).reshape(3, 4)}
    checkpoints = begin(place)
    for step in (1, 2):
        whole = {"steps": {"step": {"model": model}}, "number": step}
        checkpoints.save(step, whole, {}, {"time": 1.0, "epoch": step})
    code, out = checkpoint("ls", place)
    assert code == 0
    assert re.search(r"step-1\.a1 .* complete *\n *step-2\.a1 .* complete", out)
    assert str(place) in out
    assert "weight" in checkpoint("show", place)[1]
    assert checkpoint("verify", place / "checkpoints" / "step-1.a1")[0] == 0
    assert checkpoint("ls", "--verify", place / "checkpoints" / "step-1.a1")[1].count("verified") == 1
    first = place / "checkpoints" / "step-1.a1"
    code, out = checkpoint("diff", first, place)
    assert (code, "0 of 1 tensors and 2 plain values differ" in out) == (1, True)
    assert checkpoint("export", place, tmp_path / "model.pt")[0] == 0
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found["weight"], model["weight"])

    harm(first, "state.json", lambda content: content[:-1])
    harm(place / "checkpoints" / "step-2.a1", "manifest.json", lambda content: None)
    code, out = checkpoint("verify", place)
    assert code == 1
    assert "step-1.a1: damaged: state.json has" in out
    assert "step-2.a1, " in (listed := checkpoint("ls", place)[1])
    assert "an interrupted or running save" in listed
    with pytest.raises(CheckpointError, match=r"none is complete: step-1\.a1: state\.json has"):
        checkpoint("show", place)
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint("ls", place / "nothing")


@pytest.mark.full
def test_the_tools_tell_of_a_store_that_can_not_be_reached(tmp_path: Path) -> None:
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place), 1)
    for command in ("ls", "show", "verify"):
        counted = Failing(None, OSError())
        Bucket.before = staticmethod(counted)
        checkpoint(command, place)
        for number in range(0, len(counted.done), 3):
            Bucket.before = staticmethod(Failing(number, ConnectionError("unreachable")))
            with pytest.raises(CheckpointError, match="unreachable"):
                checkpoint(command, place)


def test_a_copy_needs_room_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place), 1)
    little = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    with pytest.raises(CheckpointError, match=r"bytes are needed for a copy of rank-0\.\w+, 5 "):
        restored(place)


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    place = path_from(f"bucket://{tmp_path}/run")
    save(begin(place), 1)
    folder = tmp_path / "run" / "checkpoints"
    others = ["step-", "step-01.a1", "step-1.a01", "step-1.a1.1", "step-1.old", "notes", "step-1.a1.x"]
    for name in others:
        (folder / name).mkdir()
        (folder / name / "file").touch()
    (folder / "step-9.a9").mkdir()
    (folder / "step-9.a9" / "rank-0.safetensors").touch()  # a save of a later attempt, under way
    save(begin(place, keep=1), 2, 3)
    assert names(place / "checkpoints") == sorted([*others, "step-3.a2", "step-9.a9"])


def test_a_checkpoint_that_was_copied_there_or_back_is_one(tmp_path: Path) -> None:
    bucket = path_from(f"bucket://{tmp_path}/run")
    Checkpoints(tmp_path / "run" / "checkpoints", Alone()).save(4, state(4), {}, {})
    assert restored(bucket) == (4, 4)
    later = begin(bucket, keep=1)
    later.restore()
    save(later, 5)
    assert names(bucket / "checkpoints") == ["step-5.a1"]
    assert restored(tmp_path / "run") == (5, 5)
    disk = Checkpoints(tmp_path / "run" / "checkpoints", Alone(), keep=1)
    disk.restore()
    save(disk, 6)
    assert names(bucket / "checkpoints") == ["step-6"]


def test_names_are_read_as_they_are_printed_and_in_the_order_of_saves() -> None:
    listed = [
        "step-8",
        *(f"step-8.{form}" for form in ("partial", "a1", "a2", "a2.2", "a10")),
        "step-9",
    ]
    read = {text: DirectoryName.read(text) for text in ("step-0", "step-3.trash", "step-7.a0", *listed)}
    assert {text: str(name) for text, name in read.items()} == {text: text for text in read}
    found = [name for name in map(read.get, listed) if name is not None]
    assert sorted(found) == found


def test_a_file_that_is_given_up_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "BLOCK", 1000)
    place = path_from(f"bucket://{tmp_path}/run")
    assert isinstance(place, RemotePath)
    for size in (5, 2500):
        with place.create() as file:
            file.write(bytes(size))
        del file
        assert not place.exists()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "found", "fix"),
    [
        (FileNotFoundError("no such bucket"), "no such bucket", "fsspec"),
        (PermissionError("read only"), rf"\[Errno {errno.EACCES}\].*read only.*\.probe-0", ""),
    ],
)
def test_an_unwritable_place_is_known_before_training(
    error: OSError, found: str, fix: str, tmp_path: Path
) -> None:
    def refuse(operation: str, key: str) -> None:
        if operation == "complete":
            raise error

    Bucket.before = staticmethod(refuse)
    with pytest.raises(CheckpointError, match=found) as caught:
        Checkpoints(path_from(f"bucket://{tmp_path}/run"), Alone()).check()
    assert fix in caught.value.fix
