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
from typer.testing import CliRunner

from helpers.checkpoint_files import Alone
from shoal.checkpoint import AnyPath, Checkpoints, commit, paths, store
from shoal.checkpoint.inspect import extract, listing, locate, manifest, verify
from shoal.checkpoint.object_store import RemotePath
from shoal.cli.main import app
from shoal.util.errors import CheckpointError

Act = Callable[[], object]
Meet = Callable[[object, str, Act], None]


def save(folder: AnyPath, step: int, value: float | None = None, **info: Any) -> None:
    """Save `step`, whose parameters are all `value`, and remove the checkpoints of other steps."""
    weight = torch.full((20,), float(step) if value is None else value)
    state = {"steps": {"step": {"model": {"weight": weight}}}}
    Checkpoints(folder, Alone(), keep=1).save(step, state, {}, info)


def checkpoint(*arguments: object) -> tuple[int, str]:
    """The exit code and what was printed; a ShoalError is raised."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())


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

    for module in (store, verify):
        monkeypatch.setattr(module, "open_file", counted)
    return counts


@pytest.mark.parametrize("command", ["show", "export", "diff", "verify", "ls"])
def test_all_listed_ones_were_removed_for_a_newer_one(
    command: str, after: Meet, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    more = {"export": [tmp_path / "out.safetensors"], "diff": [folder]}.get(command, [])
    after(commit.DiskStore, "candidates", lambda: save(folder, 2))
    code, out = checkpoint(command, folder, *more)
    assert code == 0
    assert ("The same state" if command == "diff" else "step-2") in out
    assert "step-1" not in out


def test_the_only_complete_one_was_removed_for_a_newer_one(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-0")  # damaged: it is of another step
    after(commit.DiskStore, "candidates", lambda: save(tmp_path, 2))
    assert "step 2" in checkpoint("show", tmp_path)[1]


@pytest.mark.parametrize("given", ["", "step-1"])
def test_a_save_of_the_same_step_is_not_damage(given: str, after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    after(verify, "manifest", lambda: save(tmp_path, 1, 2.0))
    code, out = checkpoint("verify", tmp_path / given)
    assert (code, out) == (0, f"{tmp_path}/step-1: complete (step 1)")


def test_a_save_of_the_same_step_and_content_is_not_damage(after: Meet, tmp_path: Path) -> None:
    """Its files are missing between two renames, and the manifests are equal."""
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"

    def replace() -> None:
        shutil.copytree(final, partial)
        final.rename(tmp_path / "step-1.trash")

    after(verify, "manifest", replace)
    after(locate, "examine", lambda: partial.rename(final))
    code, out = checkpoint("verify", tmp_path)
    assert (code, out) == (0, f"{final}: complete (step 1)")


def test_a_checkpoint_between_its_two_renames_is_found(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    shutil.copytree(final, partial)
    after(verify, "manifest", lambda: final.rename(tmp_path / "step-1.trash"))
    found = locate.examine_listed(final, read=True)
    assert found is not None
    assert (found.path, found.problems) == (partial, [])


def test_one_that_is_replaced_all_the_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    original = verify.manifest
    reads: list[AnyPath] = []

    def replaced(path: AnyPath) -> store.Manifest:
        found = original(path)
        reads.append(path)
        save(tmp_path, 1, len(reads) + 1.0)
        return found

    monkeypatch.setattr(verify, "manifest", replaced)
    with pytest.raises(CheckpointError, match="replaced it each time"):
        checkpoint("verify", tmp_path)
    assert len(reads) == 5


def test_an_export_is_of_one_save(after: Meet, tmp_path: Path) -> None:
    """Files that are opened later would be those of another save."""
    folder, out = tmp_path / "checkpoints", tmp_path / "out.safetensors"
    save(folder, 1)
    after(extract, "extract", lambda: save(folder, 1, 2.0))
    assert checkpoint("export", folder, out)[0] == 0
    assert load_file(out)["weight"].eq(2.0).all()


def test_a_save_of_the_same_step_is_not_an_error_of_show(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    after(manifest, "read_manifest", lambda: save(tmp_path, 1, note="longer than before"))
    assert "longer than before" in checkpoint("show", tmp_path)[1]


def test_a_given_checkpoint_that_was_removed_is_an_error(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    after(locate, "checkpoints", lambda: save(tmp_path, 2))
    with pytest.raises(CheckpointError, match="there is no such directory") as caught:
        checkpoint("verify", tmp_path / "step-1")
    assert caught.value.given == str(tmp_path / "step-1")


def test_ls_of_a_given_checkpoint_that_was_removed_is_an_error(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    after(locate, "is_checkpoint", lambda: save(tmp_path, 2))
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint("ls", tmp_path / "step-1")


def test_ls_of_a_given_save_that_is_running(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-2.partial").mkdir()
    code, out = checkpoint("ls", tmp_path / "step-2.partial")
    assert code == 0
    assert "step-2.partial manifest.json is missing" in out


def test_a_remote_save_of_the_same_step_is_not_damage(after: Meet, remote: AnyPath) -> None:
    checkpoints = Checkpoints(remote, Alone(), keep=1)
    checkpoints.save(1, {}, {}, {})
    after(verify, "manifest", lambda: checkpoints.save(1, {}, {}, {"second": True}))
    assert checkpoint("verify", remote) == (0, f"{remote}/step-1.a0.2: complete (step 1)")


def test_a_remote_checkpoint_that_is_being_removed_is_not_damage(after: Meet, remote: AnyPath) -> None:
    """Its manifest is gone, and other files are there."""
    checkpoints = Checkpoints(remote, Alone(), keep=2)
    for step in (1, 2):
        checkpoints.save(step, {}, {}, {})
    manifest_path = remote / "step-1.a0" / "manifest.json"
    assert isinstance(manifest_path, RemotePath)
    after(commit.RemoteStore, "candidates", manifest_path.unlink)
    assert checkpoint("verify", remote) == (0, f"{remote}/step-2.a0: complete (step 2)")


def test_a_given_save_that_is_running_is_not_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-2.partial").mkdir()
    with pytest.raises(CheckpointError, match="no finished save"):
        checkpoint("verify", tmp_path / "step-2.partial")


@pytest.mark.parametrize("command", ["verify", "ls", "show"])
def test_a_save_that_ends_while_it_is_listed(command: str, after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    final.rename(partial)
    after(commit.DiskStore, "directories", lambda: partial.rename(final))
    code, out = checkpoint(command, tmp_path)
    assert code == 0
    assert "step-1" in out
    assert "partial" not in out


def test_a_save_that_ends_while_its_folder_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    final.rename(partial)
    original = Path.iterdir

    def listed(path: Path) -> Iterator[Path]:
        found = list(original(path))
        if partial.exists():
            partial.rename(final)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", listed)
    assert locate.folders(tmp_path) == [tmp_path]


def test_a_save_that_ends_is_not_a_leftover(after: Meet, tmp_path: Path) -> None:
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    final.rename(partial)
    after(commit.DiskStore, "directories", lambda: partial.rename(final))
    assert listing.leftovers(tmp_path) == []


def test_one_under_two_names_is_listed_once(after: Meet, tmp_path: Path) -> None:
    """`step-1.partial`, which replaces `step-1`, is renamed after both were listed."""
    save(tmp_path, 1)
    final, partial = tmp_path / "step-1", tmp_path / "step-1.partial"
    shutil.copytree(final, partial)

    def publish() -> None:
        shutil.rmtree(final)
        partial.rename(final)

    after(commit.DiskStore, "candidates", publish)
    assert checkpoint("verify", tmp_path) == (0, f"{final}: complete (step 1)")


@pytest.mark.parametrize("name", [None, "state.json", "rank-0.safetensors", "manifest.json"])
def test_each_file_is_read_once(name: str | None, opened: Counter[str], tmp_path: Path) -> None:
    save(tmp_path, 1)
    if name is not None:
        content = bytearray((tmp_path / "step-1" / name).read_bytes())
        content[-3] ^= 1
        (tmp_path / "step-1" / name).write_bytes(content)
    opened.clear()
    code, out = checkpoint("verify", tmp_path)
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
        code, out = checkpoint("verify", given)
        assert (code, out) == (1, f"{tmp_path}/step-1: damaged: manifest.json is missing")
