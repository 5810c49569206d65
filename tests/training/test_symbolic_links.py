"""A run directory from another person, with links in the places of files that a run writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from helpers.ranks import RankError, Ranks
from helpers.small_training import step_of
from shoal.util.errors import CheckpointError
from shoal.util.regular_file import open_to_write, replace, write_new

pytestmark = pytest.mark.processes

PRECIOUS = "precious\n" * 20


def trains(world: shoal.World, directory: Path) -> int:
    """Train an epoch in a run directory; the number of the step that it went on from."""
    step = step_of(world, nn.Linear(3, 1))
    loader = shoal.Loader((torch.ones(8, 3),), world, batch_size=4)
    with shoal.Run(directory, step, loader, trackers=()) as run:
        run.restore()
        begun = step.number
        for batch in loader.epochs(1):
            step(batch)
        run.save()
    return begun


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    return path


@pytest.mark.parametrize("name", ["lock", "events/rank-0.jsonl", "events/rank-1.jsonl"])
def test_nothing_is_written_through_a_link(
    name: str, precious: Path, two: Ranks, tmp_path: Path
) -> None:
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    for found in two.attempt(trains, tmp_path / "run"):
        assert isinstance(found, RankError)
        assert isinstance(found.error, CheckpointError)
        assert name in found.error.found
        assert "symbolic link" in found.error.found
        assert "remove the symbolic link" in found.error.fix
    assert precious.read_text() == PRECIOUS
    assert link.is_symlink()


def test_attempts_that_are_elsewhere_are_refused(two: Ranks, tmp_path: Path) -> None:
    """A run numbers its attempts there, and removes old numbers."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for number in range(1, 20):
        (theirs / f"{number}.json").write_text(PRECIOUS)
    kept = snapshot(theirs)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attempts").symlink_to(theirs)
    for found in two.errors(CheckpointError, trains, tmp_path / "run"):
        assert "attempts" in found.found
        assert "symbolic link" in found.found
        assert "remove the symbolic link" in found.fix
    assert snapshot(theirs) == kept


@pytest.mark.parametrize("name", ["lock", "events/rank-0.jsonl"])
def test_a_pipe_is_an_error_and_not_waited_for(name: str, world: shoal.World, tmp_path: Path) -> None:
    pipe = tmp_path / "run" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="regular"):
        trains(world, tmp_path / "run")


@pytest.mark.parametrize("name", ["step-1", "step-2", "step-2.partial", "step-2.trash", "step-9"])
def test_a_link_is_no_checkpoint(name: str, world: shoal.World, tmp_path: Path) -> None:
    """What it leads to is neither read, nor written, nor removed."""
    trains(world, tmp_path / "theirs")
    kept = snapshot(tmp_path / "theirs")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / name).symlink_to(tmp_path / "theirs" / "checkpoints" / "step-2")
    if "." in name:
        assert trains(world, tmp_path / "run") == 0
    else:
        with pytest.raises(CheckpointError, match="symbolic link"):
            trains(world, tmp_path / "run")
    assert snapshot(tmp_path / "theirs") == kept


def test_directories_may_be_links(world: shoal.World, tmp_path: Path) -> None:
    """People keep checkpoints on another file system by them."""
    (tmp_path / "run").mkdir()
    for name in ("checkpoints", "events"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "scratch" / name)
    trains(world, tmp_path / "run")
    assert trains(world, tmp_path / "run") == 2
    assert (tmp_path / "scratch" / "checkpoints" / "step-2" / "manifest.json").exists()
    assert (tmp_path / "scratch" / "events" / "rank-0.jsonl").exists()


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_file_that_is_replaced_is_not_written_through(precious: Path, tmp_path: Path) -> None:
    for name in ("note.json", "note.partial"):
        (tmp_path / name).symlink_to(precious)
    replace(tmp_path / "note.json", "new")
    assert (tmp_path / "note.json").read_text() == "new"
    assert not (tmp_path / "note.json").is_symlink()
    assert precious.read_text() == PRECIOUS


def test_a_new_file_takes_no_name_that_is_there(precious: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (link, precious):
        with pytest.raises(FileExistsError):
            write_new(path, "text")
    write_new(tmp_path / "new", "text", private=True)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_opened_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in (b"a", b"b"):
        descriptor = open_to_write(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, text)
        os.close(descriptor)
    assert path.read_bytes() == b"ab"
