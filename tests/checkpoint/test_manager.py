"""Saves by several real processes: killed, refused and resharded."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shoal
from helpers.checkpoint_files import Alone
from helpers.kill_in_save import Counted, HookedFiles, Killed
from helpers.ranks import Ranks
from shoal.checkpoint import AnyPath, Checkpoints, Files
from shoal.checkpoint.store import damage, manifest_of
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.processes


class Refused(HookedFiles):
    """Refuses one operation."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__()
        self._number = number
        self._code = code

    def at(self, number: int, path: AnyPath | None) -> None:
        if number == self._number:
            # As from the system: a call on an open file names none.
            raise OSError(self._code, os.strerror(self._code), path and str(path))


@pytest.fixture(scope="module")
def two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(2)


@pytest.fixture(scope="module")
def three(ranks_of: Callable[[int], Ranks]) -> Ranks:
    return ranks_of(3)


def state(version: int) -> dict[str, Any]:
    tensors = {name: torch.full((5, size), float(version)) for size, name in enumerate("abcde")}
    return {"version": version, "tensors": tensors}


def own(rank: int) -> dict[str, Any]:
    return {"rank": rank, "random": torch.full((3,), rank, dtype=torch.uint8)}


def assert_no_half(directory: Path) -> None:
    """What has the name of a checkpoint is whole, before anything tidies up."""
    for path in directory.iterdir():
        if not path.suffix:
            assert damage(path, manifest_of(path)) is None


def version_of(directory: Path) -> tuple[int, int]:
    """Restore; the step and the version of the state, having looked at all of it."""
    loaded = Checkpoints(directory, Alone()).restore()
    assert loaded is not None
    version = loaded.state["version"]
    expected = state(version)["tensors"]
    assert loaded.state["tensors"].keys() == expected.keys()
    for name, tensor in loaded.state["tensors"].items():
        assert torch.equal(tensor, expected[name])
    return loaded.step, version


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save; `files` are those of rank `victim`."""

    directory: Path
    step: int
    version: int
    victim: int = 0
    files: HookedFiles = field(default_factory=Counted)


def save(world: shoal.World, what: Save) -> list[str]:
    """The names of the operations of this rank."""
    files = what.files if world.rank == what.victim else Counted()
    Checkpoints(what.directory, world, files=files).save(
        what.step, state(what.version), own(world.rank), {}
    )
    return files.names


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_operation(victim: int, tmp_path: Path, three: Ranks) -> None:
    three.call(save, Save(directory=tmp_path / "begin", step=1, version=10))
    shutil.copytree(tmp_path / "begin", tmp_path / "count")
    new = Save(directory=tmp_path / "count", step=2, version=20, victim=victim)
    operations = three.call(save, new)[victim]
    assert version_of(tmp_path / "count") == (2, 20)
    assert {"create", "write", "sync"} < set(operations)
    assert ("rename" in operations) == (victim == 0)

    seen = []
    for number in itertools.count():
        directory = tmp_path / f"kill-{number}"
        shutil.copytree(tmp_path / "begin", directory)
        killed = replace(new, directory=directory, files=Killed(number))
        with Ranks(3) as ranks:
            saved = ranks.call_until_killed(save, killed)
        assert_no_half(directory)
        if saved is not None:
            break
        seen.append(version_of(directory))
        assert seen[-1] in ((1, 10), (2, 20)), number
        Checkpoints(directory, Alone()).save(3, state(30), own(0), {})
        assert version_of(directory) == (3, 30), number
        assert not [path.name for path in directory.iterdir() if path.suffix]
        shutil.rmtree(directory)
    # The rank that creates the directory of the save syncs its parent: one operation more or less.
    assert abs(len(seen) - len(operations)) <= 1
    # Up to the commit the old one, from there on the new one; only rank 0 commits.
    assert seen == sorted(seen)
    assert seen[0] == (1, 10)
    assert seen[-1] == ((2, 20) if victim == 0 else (1, 10))


def refuse_everywhere(world: shoal.World, directory: Path, code: int) -> list[tuple[str, str]]:
    """Refuse each operation in turn, on rank 0 and on rank 1; the errors of this rank."""
    errors = []
    for victim in (0, 1):
        for number in itertools.count():
            files: HookedFiles = Refused(number, code) if world.rank == victim else Counted()
            checkpoints = Checkpoints(directory, world, files=files)
            begun = checkpoints.restore()
            assert begun is not None
            try:
                checkpoints.save(begun.step + 1, state(begun.step + 1), own(world.rank), {})
                error = ("", "")
            except CheckpointError as failure:
                error = (failure.found, failure.fix)
            after = Checkpoints(directory, world).restore()
            assert after is not None
            assert after.state["version"] == after.step == begun.step + (error == ("", ""))
            assert after.rank_state is not None
            assert after.rank_state["rank"] == world.rank
            errors.append(error)
            if world.gather(len(files.names) <= number)[victim]:
                break
    return errors


@pytest.mark.parametrize(
    ("code", "text", "fix"),
    [
        (errno.ENOSPC, "No space left", "free space"),
        pytest.param(errno.EACCES, "Permission denied", "writable", marks=pytest.mark.long),
        pytest.param(errno.EDQUOT, "quota exceeded", "quota shows", marks=pytest.mark.long),
        (errno.EIO, "Input/output error", "check the file system"),
    ],
)
@pytest.mark.full
def test_refused_at_every_operation(
    code: int, text: str, fix: str, tmp_path: Path, three: Ranks
) -> None:
    Checkpoints(tmp_path, Alone()).save(0, state(0), own(0), {})
    three.call(save, Save(directory=tmp_path, step=1, version=1))
    errors = three.call(refuse_everywhere, tmp_path, code)
    assert errors[0] == errors[1] == errors[2]
    failed = [error for error in errors[0] if error != ("", "")]
    assert len(failed) >= 10
    for found, advice in failed:
        assert found.startswith(("rank 0: ", "rank 1: "))
        assert text in found
        assert str(tmp_path) in found or "step-" in found
        assert fix in advice
    assert {found[:6] for found, _ in failed} == {"rank 0", "rank 1"}


class TakenOver(Files):
    """Rank 1 can't write; then rank 0 can't remove what it wrote: another attempt has begun."""

    def create(self, path: AnyPath) -> BinaryIO:
        if path.name == "rank-1.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().create(path)

    def unlink(self, path: AnyPath) -> None:
        raise CheckpointError(given="a save", found="attempt 2 has taken over", fix="end this process")


def save_what_one_rank_can_not(world: shoal.World, directory: Path) -> None:
    bad = {"rank": {1, 2}} if world.rank == 2 else {"rank": [1, 2]}
    Checkpoints(directory, world).save(1, state(1), bad, {})


def save_while_taken_over(world: shoal.World, directory: Path) -> None:
    Checkpoints(directory, world, files=TakenOver()).save(1, state(1), own(world.rank), {})


def check_unwritable(world: shoal.World, directory: Path) -> None:
    Checkpoints(directory, world).check()
    files: Files = Refused(0, errno.EROFS) if world.rank == 1 else Files()
    Checkpoints(directory, world, files=files).check()


@pytest.mark.parametrize(
    ("action", "found", "left"),
    [
        (save_what_one_rank_can_not, "rank 2: a value of type builtins.set", []),
        (check_unwritable, "rank 1: ", []),
        # No rank waits although the failed save can't be removed.
        (save_while_taken_over, "rank 0: attempt 2 has taken over", ["step-1.partial"]),
    ],
)
def test_what_one_rank_refuses_is_refused_on_all(
    action: Callable[[shoal.World, Path], None],
    found: str,
    left: list[str],
    tmp_path: Path,
    three: Ranks,
) -> None:
    first, *others = three.errors(CheckpointError, action, tmp_path / "new")
    assert {str(first)} == {str(each) for each in others}
    assert first.found.startswith(found)
    assert ("rank/2/rank" in first.given) == (action is save_what_one_rank_can_not)
    assert [path.name for path in (tmp_path / "new").glob("*")] == left


def restore_all(world: shoal.World, directory: Path) -> tuple[int, list[str], list[int] | None]:
    loaded = Checkpoints(directory, world).restore()
    assert loaded is not None
    skipped = [f"{one.path.name}: {one.reason}" for one in loaded.skipped]
    if loaded.rank_state is None:
        return loaded.step, skipped, None
    return loaded.step, skipped, [loaded.rank_state["rank"], *loaded.rank_state["random"].tolist()]


def test_all_ranks_go_back_to_the_same_one(tmp_path: Path, two: Ranks, three: Ranks) -> None:
    """The state of a rank comes back at the same number of ranks only."""
    for step in (1, 2, 3):
        three.call(save, Save(directory=tmp_path, step=step, version=step))
    (tmp_path / "step-3" / "rank-1.safetensors").unlink()
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{")
    results = three.call(restore_all, tmp_path)
    step, skipped, _ = results[0]
    assert results == [(1, skipped, [rank] * 4) for rank in range(3)]
    assert skipped[0].startswith("step-3: rank-1.safetensors is missing")
    assert skipped[1].startswith("step-2: manifest.json is truncated")
    assert two.call(restore_all, tmp_path) == [(1, skipped, None)] * 2


def save_large(world: shoal.World, directory: Path) -> None:
    tensors = {str(i): torch.full((10_000,), float(i)) for i in range(3)}
    Checkpoints(directory, world).save(1, tensors, {}, {})


def test_replicated_tensors_are_written_once(tmp_path: Path, three: Ranks) -> None:
    three.call(save_large, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("rank-*")]
    assert len(sizes) == 3
    assert 3 * 40_000 < sum(sizes) < 3 * 40_000 + 3_000
    assert max(sizes) < 41_000


# 5 rows over 2 ranks: 3 + 2; over 3 ranks: 2 + 2 + 1. 1 row: some ranks have nothing.
WHOLE = {
    "matrix": torch.arange(35.0).reshape(5, 7),
    "columns": torch.arange(35).reshape(7, 5),
    "complex": torch.complex(torch.arange(10.0), -torch.arange(10.0)).reshape(5, 2),
    "single": torch.arange(4.0).reshape(1, 4),
}
AXES = {"matrix": 0, "columns": 1, "complex": 0, "single": 0}


def sharded(world: shoal.World, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world.size,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(AXES[name])]) for name, tensor in whole.items()
    }


def save_sharded(world: shoal.World, directory: Path) -> None:
    tree = {"sharded": sharded(world, WHOLE), "replicated": WHOLE, "plain": 7}
    Checkpoints(directory, world).save(1, tree, {}, {})


def load_sharded(world: shoal.World, directory: Path) -> None:
    """As shards, what was saved as shards and what each rank had; then what was sharded as a whole."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    template = {model: sharded(world, empty) for model in ("sharded", "replicated")}
    loaded = Checkpoints(directory, world).restore(template)
    whole = Checkpoints(directory, world).restore()
    assert loaded is not None
    assert whole is not None
    assert loaded.state["plain"] == 7
    for model, tensors in template.items():
        for name, wanted in WHOLE.items():
            tensor = loaded.state[model][name]
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), wanted), name
            assert torch.equal(tensors[name].full_tensor(), wanted), name
            assert torch.equal(whole.state[model][name], wanted), name


def test_shards_come_back_at_another_size(tmp_path: Path, two: Ranks, three: Ranks) -> None:
    for writers, readers in ((two, three), (three, two)):
        directory = tmp_path / str(writers.size)
        writers.call(save_sharded, directory)
        readers.call(load_sharded, directory)
