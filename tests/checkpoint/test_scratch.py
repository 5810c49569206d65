"""Checkpoints purged or altered between restarts: the newest whole one is used, and it is said."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.failing_disk import FILES, NEWEST, UNTIL, Training, Undisturbed, load, train
from helpers.ranks import RankError, Ranks
from shoal.checkpoint.store import FileRecord, Manifest

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def undisturbed(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(directory=directory, ended=two.call(train, Training(directory=directory)))


def purge(*relative: str) -> Callable[[Path], None]:
    def remove(directory: Path) -> None:
        for name in relative:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


HALVES = [tuple(f"{NEWEST}/{name}" for name in FILES[start : start + 2]) for start in (0, 2)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("purged", "restored", "told"),
    [
        pytest.param(purge(""), None, None, id="the run", marks=pytest.mark.full),
        pytest.param(purge("checkpoints"), None, None, id="all checkpoints", marks=pytest.mark.full),
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
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
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
