"""`shoal checkpoint` next to a run that saves, renames and removes at the worst moment."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoint_files import Alone, checkpoint, flip
from shoal.checkpoint import AnyPath, Checkpoints, disk_and_remote, paths, store
from shoal.checkpoint.inspect import extract, listing, locate, manifest
from shoal.checkpoint.object_store import RemotePath
from shoal.util.errors import CheckpointError

Act = Callable[[], object]
Meet = Callable[[object, str, Act], None]


def save(folder: AnyPath, step: int, value: float | None = None, **info: Any) -> None:
    """Save `step`, whose parameters are all `value`, and remove the checkpoints of other steps."""
    weight = torch.full((20,), float(step) if value is None else value)
    state = {"steps": {"step": {"model": {"weight": weight}}}}
    Checkpoints(folder, Alone(), keep=1).save(step, state, {}, info)


def said(*arguments: object) -> tuple[int, str]:
    """The exit code and the words that were printed."""
    code, out = checkpoint(*arguments)
    return code, " ".join(out.split())


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Run an action when a function returns for the first time."""

    def meet(owner: object, name: str, act: Act) -> None:
        acts: Iterator[Act] = iter([act])
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            next(acts, lambda: None)()
            return result

        monkeypatch.setattr(owner, name, wrapped)

    return meet


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[AnyPath]:
    """A directory on a file system without renames."""
    yield paths.path_from(f"memory://{tmp_path}/checkpoints")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened to verify it."""
    counts: Counter[str] = Counter()
    original = paths.open_file

    def counted(path: AnyPath) -> BufferedReader:
        counts[path.name] += 1
        return original(path)

    for module in (store, locate):
        monkeypatch.setattr(module, "open_file", counted)
    return counts


@pytest.mark.parametrize("command", ["show", "export", "diff", "verify", "ls"])
def test_all_listed_ones_were_removed_for_a_newer_one(
    command: str, after: Meet, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    more = {"export": [tmp_path / "out.safetensors"], "diff": [folder]}.get(command, [])
    after(disk_and_remote.DiskStore, "candidates", lambda: save(folder, 2))
    code, out = said(command, folder, *more)
    assert code == 0
    assert ("The same state" if command == "diff" else "step-2") in out
    assert "step-1" not in out


def test_the_only_complete_one_was_removed_for_a_newer_one(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-0")  # damaged: it is of another step
    after(disk_and_remote.DiskStore, "candidates", lambda: save(tmp_path, 2))
    assert "step 2" in said("show", tmp_path)[1]


def publish(folder: Path) -> None:
    """The first rename of a save that replaces step 1, and the removal after it."""
    shutil.rmtree(folder / "step-1")
    (folder / "step-1.partial").rename(folder / "step-1")


def replace(folder: Path) -> None:
    """The files of step 1 are missing between two renames, and the manifests are equal."""
    shutil.rmtree(folder / "step-1.trash", ignore_errors=True)
    shutil.copytree(folder / "step-1", folder / "step-1.partial")
    (folder / "step-1").rename(folder / "step-1.trash")


def test_a_save_of_the_same_step_is_not_damage(after: Meet, tmp_path: Path) -> None:
    whole = (0, f"{tmp_path}/step-1: complete (step 1)")
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    for given in (tmp_path, final):
        save(tmp_path, 1)
        after(locate, "manifest_of", lambda: save(tmp_path, 1, 2.0))
        assert said("verify", given) == whole
    # With the same content.
    after(locate, "manifest_of", lambda: replace(tmp_path))
    after(locate, "examine", lambda: partial.rename(final))
    assert said("verify", tmp_path) == whole
    # Its new name is another one after both names were listed.
    shutil.copytree(final, partial)
    after(disk_and_remote.DiskStore, "candidates", lambda: publish(tmp_path))
    assert said("verify", tmp_path) == whole
    # Between its two renames.
    after(locate, "manifest_of", lambda: replace(tmp_path))
    found = locate.examine_listed(final, read=True)
    assert found is not None
    assert (found.path, found.problems) == (partial, [])


def test_one_that_is_replaced_all_the_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    original = store.manifest_of
    reads: list[AnyPath] = []

    def replaced(path: AnyPath) -> store.Manifest:
        found = original(path)
        reads.append(path)
        save(tmp_path, 1, len(reads) + 1.0)
        return found

    monkeypatch.setattr(locate, "manifest_of", replaced)
    with pytest.raises(CheckpointError, match="replaced it each time"):
        said("verify", tmp_path)
    assert len(reads) == 5


def test_what_is_shown_and_exported_is_of_one_save(after: Meet, tmp_path: Path) -> None:
    """Files that are opened later would be those of another save."""
    folder, out = tmp_path / "checkpoints", tmp_path / "out.safetensors"
    save(folder, 1)
    after(extract, "extract", lambda: save(folder, 1, 2.0))
    assert said("export", folder, out)[0] == 0
    assert load_file(out)["weight"].eq(2.0).all()
    after(manifest, "read_manifest", lambda: save(folder, 1, note="longer than before"))
    assert "longer than before" in said("show", folder)[1]


@pytest.mark.parametrize(("command", "seen"), [("verify", "checkpoints"), ("ls", "is_checkpoint")])
def test_a_given_checkpoint_that_was_removed_is_an_error(
    command: str, seen: str, after: Meet, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    after(locate, seen, lambda: save(tmp_path, 2))
    with pytest.raises(CheckpointError, match="there is no such directory") as caught:
        said(command, tmp_path / "step-1")
    assert str(tmp_path / "step-1") in caught.value.given


def test_a_given_save_that_is_running(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-2.partial").mkdir()
    code, out = said("ls", tmp_path / "step-2.partial")
    assert code == 0
    assert "step-2.partial manifest.json is missing" in out
    with pytest.raises(CheckpointError, match="no finished save"):
        said("verify", tmp_path / "step-2.partial")


def test_remote_saves_and_removals_are_not_damage(after: Meet, remote: AnyPath) -> None:
    checkpoints = Checkpoints(remote, Alone(), keep=2)
    checkpoints.save(1, {}, {}, {})
    after(locate, "manifest_of", lambda: checkpoints.save(1, {}, {}, {"second": True}))
    assert said("verify", remote) == (0, f"{remote}/step-1.a0.2: complete (step 1)")
    checkpoints.save(2, {}, {}, {})
    # The manifest of one is gone, and other files are there.
    manifest_path = remote / "step-1.a0.2" / "manifest.json"
    assert isinstance(manifest_path, RemotePath)
    after(disk_and_remote.RemoteStore, "candidates", manifest_path.unlink)
    assert said("verify", remote) == (0, f"{remote}/step-2.a0: complete (step 2)")


@pytest.mark.parametrize("command", ["verify", "ls", "show"])
def test_a_save_that_ends_while_it_is_listed(command: str, after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    final.rename(partial)
    after(disk_and_remote.DiskStore, "directories", lambda: partial.rename(final))
    code, out = said(command, tmp_path)
    assert code == 0
    assert "step-1" in out
    assert "partial" not in out


def test_a_save_that_ends_while_its_folder_is_searched(
    after: Meet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    original = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(list(original(path))))
    final.rename(partial)
    after(Path, "iterdir", lambda: partial.rename(final))
    assert locate.folders(tmp_path) == [tmp_path]
    final.rename(partial)
    after(disk_and_remote.DiskStore, "directories", lambda: partial.rename(final))
    assert listing.leftovers(tmp_path) == []


@pytest.mark.parametrize("name", [None, "state.json", "rank-0.safetensors", "manifest.json"])
def test_each_file_is_read_once(name: str | None, opened: Counter[str], tmp_path: Path) -> None:
    save(tmp_path, 1)
    if name is not None:
        flip(tmp_path / "step-1" / name)
    opened.clear()
    code, out = said("verify", tmp_path)
    assert code == int(name is not None)
    assert name is None or f"damaged: {name}" in out
    # The state is read again, to check that its tensors are in the files, if they are whole.
    more = {"state.json": 2} if name is None else {}
    usual = {"rank-0.safetensors": 1, "state.json": 1, "manifest.json": 1} | more
    assert opened == ({"manifest.json": 1} if name == "manifest.json" else usual)


def test_a_missing_manifest_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1" / "manifest.json").unlink()
    for given in (tmp_path, tmp_path / "step-1"):
        assert said("verify", given) == (1, f"{tmp_path}/step-1: damaged: manifest.json is missing")
