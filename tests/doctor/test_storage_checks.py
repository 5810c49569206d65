"""The checks of datasets and run directories in `shoal doctor`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_facts import grave, seen
from shoal.tools.doctor.checks import filesystem, software
from shoal.tools.doctor.findings import Severity

GIB = 2**30


def test_a_dataset_is_compared_by_names_sizes_and_samples(tmp_path: Path) -> None:
    found = []
    for number, content in enumerate((b"x" * 300_000, b"x" * 300_000, b"x" * 299_999 + b"y")):
        folder = tmp_path / str(number)
        (folder / "a").mkdir(parents=True)
        (folder / "a/one").write_bytes(content)
        (folder / "two").write_bytes(b"")
        found.append(software.describe_dataset(folder))
    alike = [{name: value for name, value in one.items() if name != "path"} for one in found]
    assert alike[0] == alike[1]
    assert (found[0]["files"], found[0]["bytes"]) == (2, 300_000)
    (told,) = grave(list(software.check_dataset(seen(found))))
    assert told[2].startswith("content: ")
    assert told[2].endswith(" on rank 2 (node2)")
    (tmp_path / "0/two").write_bytes(b"1")
    assert software.describe_dataset(tmp_path / "0")["listing"] != found[0]["listing"]


def test_a_directory_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    fine = filesystem.try_directory(tmp_path / "runs/a")
    assert fine["troubles"] == {}
    assert fine["folder"] == str(tmp_path)
    monkeypatch.setattr("os.rename", refuse)
    monkeypatch.setattr("fcntl.lockf", refuse)
    found = grave(list(filesystem.check_directories(seen([fine, filesystem.try_directory(tmp_path)]))))
    assert [(what, state) for what, state, _ in found] == [
        ("rename", Severity.WARNING),
        ("lock", Severity.WARNING),
    ]
    assert all(text.startswith("rank 1 (node1): failed") for _, _, text in found)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for run in ("taken", "taken/a/b", "dangling"):
        with pytest.raises(NotADirectoryError, match=run.partition("/")[0]):
            filesystem.try_directory(tmp_path / run)
        assert filesystem.nearest_existing(tmp_path / "new" / "a") == tmp_path, run


def test_room_and_speed_of_a_directory(tmp_path: Path) -> None:
    fine = filesystem.try_directory(tmp_path) | {
        "free": 100 * GIB,
        "quota": "",
        "inodes": 10**6,
        "sync": 0.01,
    }

    def told(**more: Any) -> list[tuple[str, Severity]]:
        found = grave(list(filesystem.check_directories(seen([fine, {**fine, **more}]))))
        return [(what, state) for what, state, _ in found]

    assert told() == []
    assert told(free=GIB) == told(inodes=9, free=99 * GIB) == [("room", Severity.WARNING)]
    assert told(free=0) == [("room", Severity.FAILURE)]
    assert told(sync=2.5) == [("sync", Severity.WARNING)]
    assert told(quota="/home 12G*", free=99 * GIB) == [("quota", Severity.WARNING)]


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    (found,) = filesystem.check_directories(seen([filesystem.try_directory(tmp_path)]))
    assert found.state is Severity.FAILURE
    assert found.found.endswith(") can't be written: Read-only file system")
