"""A power failure at every operation of saves: what was committed is restored, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest
import torch

from helpers.checkpoint_files import Alone
from helpers.exploration.crash_disk import RecordedFiles, crash_states, write_tree
from helpers.exploration.mutants import load_variant
from shoal.checkpoint import AnyPath, Checkpoints, disk_and_remote, manager, store
from shoal.util.errors import CheckpointError

STEPS = (1, 2, 2, 3)
"""The steps that are saved: one of them twice."""
BELOW = "runs/a/checkpoints"


def state(save: int) -> dict[str, Any]:
    return {"save": save, "weight": torch.full((7,), float(save))}


def lost(disk: Path, made: type[RecordedFiles], keep: int) -> str:
    """Save, then restore from each state of the disk; the first state that lost something."""
    (disk / "real").mkdir()
    files = made(disk / "real")
    saved = manager.Checkpoints(disk / "real" / BELOW, Alone(), keep=keep, files=files)
    committed: list[tuple[int, int]] = []
    for number, step in enumerate(STEPS):
        saved.save(step, state(number), {}, {})
        committed.append((len(files.log), number))
    states = 0
    restored: dict[Any, int | str] = {}
    for done, tree in crash_states(files.log, files.folders):
        states += 1
        if tree not in restored:
            restored[tree] = restore(disk / "crashed", tree)
        newest = max((number for at, number in committed if at <= done), default=-1)
        found = restored[tree]
        if isinstance(found, str) or found < newest:
            operations = "\n  ".join(f"{c.kind} {c.name}" for c in files.log[:done][-6:])
            return f"save {newest} is lost: {found}, after {done} operations:\n  {operations}\n{tree}"
    print(f"{states:,} states of the disk, {len(restored):,} different")
    return ""


def restore(disk: Path, tree: Any) -> int | str:
    """The number of the save that a new process restores; -1 for none; the error where it fails."""
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    write_tree(tree, disk)
    try:
        loaded = Checkpoints(disk / BELOW, Alone()).restore()
    except CheckpointError as error:
        return str(error)
    if loaded is None:
        return -1
    number = loaded.state["save"]
    assert torch.equal(loaded.state["weight"], state(number)["weight"])
    return int(number)


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.full)])
def test_no_committed_save_is_lost(keep: int, tmp_path: Path) -> None:
    assert not lost(tmp_path, RecordedFiles, keep)


class UnsyncedFiles(RecordedFiles):
    """Leaves out the sync of files."""

    def sync(self, file: BinaryIO) -> None:
        file.flush()


class UnsyncedDirectories(RecordedFiles):
    """Leaves out the sync of directories."""

    def sync_directory(self, path: AnyPath) -> None:
        pass


class UnsyncedParents(RecordedFiles):
    """Leaves out the sync of the parents of a new directory."""

    def make_directory(self, path: AnyPath) -> None:
        assert isinstance(path, Path)
        for parent in reversed([path, *path.parents]):
            if not parent.exists():
                self.create_directory(parent)


@pytest.mark.parametrize("files", [UnsyncedFiles, UnsyncedDirectories, UnsyncedParents])
def test_a_missing_sync_is_found(files: type[RecordedFiles], tmp_path: Path) -> None:
    found = lost(tmp_path, files, keep=1)
    print(found)
    assert found


SEAL = """        self.files.sync_directory(target)
        self._write(target / MANIFEST, [manifest.render()])
"""


@pytest.mark.parametrize(
    ("module", "owner", "method", "old", "new"),
    [
        # The directory is not synced before its manifest is written.
        (store, "Store", "seal", SEAL, SEAL.splitlines()[1] + "\n"),
        # A committed save that was not renamed yet is taken for an unfinished one.
        (disk_and_remote, "DiskStore", "_settle", "if not self.is_committed(partial):", "if True:"),
        # Retention removes one checkpoint too many.
        (manager, "Checkpoints", "_retire", "else step < oldest", "else step <= oldest"),
    ],
)
def test_a_defect_of_a_save_is_found(
    module: ModuleType,
    owner: str,
    method: str,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = getattr(load_variant(module, old, new), owner)
    monkeypatch.setattr(getattr(module, owner), method, getattr(wrong, method))
    found = lost(tmp_path, RecordedFiles, keep=1)
    print(found)
    assert found
