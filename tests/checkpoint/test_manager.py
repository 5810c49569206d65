"""Saves by several real processes: killed, refused and resharded."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from helpers.kill_in_save import Counted, HookedFiles, Killed
from helpers.processes import Alone, OverGloo, Processes, run
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
    keep: int = 3
    victim: int = 0
    files: HookedFiles = field(default_factory=Counted)


def save(world: OverGloo, what: Save) -> list[str]:
    """The names of the operations of this rank."""
    files = what.files if world.rank == what.victim else Counted()
    checkpoints = Checkpoints(what.directory, world, keep=what.keep, files=files)
    checkpoints.save(what.step, state(what.version), own(world.rank), {})
    return files.names


def plain_beginning(directory: Path) -> None:
    """Step 1 is there; step 2 will be saved."""
    run(3, save, Save(directory=directory, step=1, version=10))


def crowded_beginning(directory: Path) -> None:
    """Step 2 will be saved again, beside what a killed save and a killed removal left."""
    run(3, save, Save(directory=directory, step=1, version=10))
    run(3, save, Save(directory=directory, step=2, version=20))
    for leftover in ("step-2.partial", "step-7.partial", "step-0.trash"):
        shutil.copytree(directory / "step-1", directory / leftover)
    (directory / "step-2.partial" / "manifest.json").unlink()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("begin", "keep", "before"),
    [
        pytest.param(plain_beginning, 3, (1, 10), marks=pytest.mark.full),
        pytest.param(crowded_beginning, 1, (2, 20), marks=pytest.mark.long),
    ],
)
def test_killed_at_every_operation(
    begin: Any, keep: int, before: tuple[int, int], victim: int, tmp_path: Path
) -> None:
    begin(tmp_path / "begin")
    shutil.copytree(tmp_path / "begin", tmp_path / "count")
    new = Save(directory=tmp_path / "count", step=2, version=21, keep=keep, victim=victim)
    operations = run(3, save, new)[victim]
    assert version_of(tmp_path / "count") == (2, 21)
    assert {"create", "write", "sync"} < set(operations)
    assert ("rename" in operations) == (victim == 0)

    seen = []
    for number in itertools.count():
        directory = tmp_path / f"kill-{number}"
        shutil.copytree(tmp_path / "begin", directory)
        killed = replace(new, directory=directory, files=Killed(number))
        with Processes(3, save, killed) as processes:
            code = processes.wait_for_exit(victim)
        assert_no_half(directory)
        if code == 0:
            break
        assert code == -signal.SIGKILL, number
        seen.append(version_of(directory))
        assert seen[-1] in (before, (2, 21)), number
        checkpoints = Checkpoints(directory, Alone(), keep=keep)
        checkpoints.save(3, state(30), own(0), {})
        assert version_of(directory) == (3, 30), number
        assert not [path.name for path in directory.iterdir() if path.suffix]
        shutil.rmtree(directory)
    # The rank that creates the directory of the save syncs its parent: one operation more or less.
    assert abs(len(seen) - len(operations)) <= 1
    # Up to the commit the old one, from there on the new one; only rank 0 commits.
    assert seen == sorted(seen)
    assert seen[0] == before
    assert seen[-1] == ((2, 21) if victim == 0 else before)


def refuse_everywhere(world: OverGloo, directory: Path, code: int) -> list[tuple[str, str]]:
    """Refuse each operation in turn, on rank 0 and on rank 1; the errors of this rank."""
    errors = []
    for victim in (0, 1):
        number = 0
        while True:
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
            number += 1
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
def test_refused_at_every_operation(code: int, text: str, fix: str, tmp_path: Path) -> None:
    Checkpoints(tmp_path, Alone()).save(0, state(0), own(0), {})
    run(3, save, Save(directory=tmp_path, step=1, version=1))
    errors = run(3, refuse_everywhere, tmp_path, code)
    assert errors[0] == errors[1] == errors[2]
    failed = [error for error in errors[0] if error != ("", "")]
    assert len(failed) >= 10
    for found, advice in failed:
        assert found.startswith(("rank 0: ", "rank 1: "))
        assert text in found
        assert str(tmp_path) in found or "step-" in found
        assert fix in advice
    assert {found[:6] for found, _ in failed} == {"rank 0", "rank 1"}


def save_what_one_rank_can_not(world: OverGloo, directory: Path) -> tuple[str, str]:
    bad = {"rank": {1, 2}} if world.rank == 2 else {"rank": [1, 2]}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(directory, world).save(1, state(1), bad, {})
    return caught.value.given, caught.value.found


def test_a_value_refused_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    errors = run(3, save_what_one_rank_can_not, tmp_path)
    assert errors[0] == errors[1] == errors[2]
    assert "rank/2/rank" in errors[0][0]
    assert errors[0][1].startswith("rank 2: a value of type builtins.set")
    assert list(tmp_path.iterdir()) == []


class TakenOver(Files):
    """Rank 1 can't write; then rank 0 can't remove what it wrote: another attempt has begun."""

    def create(self, path: AnyPath) -> BinaryIO:
        if path.name == "rank-1.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().create(path)

    def unlink(self, path: AnyPath) -> None:
        raise CheckpointError(given="a save", found="attempt 2 has taken over", fix="end this process")


def save_while_taken_over(world: OverGloo, directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(directory, world, files=TakenOver()).save(1, state(1), own(world.rank), {})
    return caught.value.found


def test_no_rank_waits_when_a_failed_save_can_not_be_removed(tmp_path: Path) -> None:
    assert run(2, save_while_taken_over, tmp_path) == ["rank 0: attempt 2 has taken over"] * 2


def check_unwritable(world: OverGloo, directory: Path) -> str:
    files: Files = Refused(0, errno.EROFS) if world.rank == 1 else Files()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(directory, world, files=files).check()
    Checkpoints(directory, world).check()
    return caught.value.found


def test_a_directory_that_one_rank_can_not_write(tmp_path: Path) -> None:
    errors = run(2, check_unwritable, tmp_path / "new")
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1: ")
    assert list((tmp_path / "new").iterdir()) == []


def restore_with_a_vanished_file(world: OverGloo, directory: Path) -> tuple[int, list[str]]:
    loaded = Checkpoints(directory, world).restore()
    assert loaded is not None
    return loaded.step, [f"{one.path.name}: {one.reason}" for one in loaded.skipped]


def test_all_ranks_go_back_to_the_same_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run(3, save, Save(directory=tmp_path, step=step, version=step))
    (tmp_path / "step-3" / "rank-1.safetensors").unlink()
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{")
    results = run(3, restore_with_a_vanished_file, tmp_path)
    assert results[0] == results[1] == results[2]
    step, skipped = results[0]
    assert step == 1
    assert skipped[0].startswith("step-3: rank-1.safetensors is missing")
    assert skipped[1].startswith("step-2: manifest.json is truncated")


def own_state(world: OverGloo, directory: Path) -> Any:
    loaded = Checkpoints(directory, world).restore()
    assert loaded is not None
    return loaded.rank_state and (loaded.rank_state["rank"], loaded.rank_state["random"].tolist())


def test_rank_state_comes_back_only_at_the_same_size(tmp_path: Path) -> None:
    run(3, save, Save(directory=tmp_path, step=1, version=1))
    assert run(3, own_state, tmp_path) == [(rank, [rank] * 3) for rank in range(3)]
    assert run(2, own_state, tmp_path) == [None, None]


def test_replicated_tensors_are_written_once(tmp_path: Path) -> None:
    run(3, save_large, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("rank-*")]
    assert len(sizes) == 3
    assert 3 * 40_000 < sum(sizes) < 3 * 40_000 + 3_000
    assert max(sizes) < 41_000


def save_large(world: OverGloo, directory: Path) -> None:
    tensors = {str(i): torch.full((10_000,), float(i)) for i in range(3)}
    Checkpoints(directory, world).save(1, tensors, {}, {})


# 5 rows over 2 ranks: 3 + 2; over 3 ranks: 2 + 2 + 1. 1 row: some ranks have nothing.
WHOLE = {
    "matrix": torch.arange(35.0).reshape(5, 7),
    "columns": torch.arange(35).reshape(7, 5),
    "complex": torch.complex(torch.arange(10.0), -torch.arange(10.0)).reshape(5, 2),
    "single": torch.arange(4.0).reshape(1, 4),
}
AXES = {"matrix": 0, "columns": 1, "complex": 0, "single": 0}


def sharded(world: OverGloo, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world.size,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(AXES[name])]) for name, tensor in whole.items()
    }


def save_sharded(world: OverGloo, directory: Path) -> None:
    tree = {"model": sharded(world, WHOLE), "replicated": WHOLE["matrix"], "plain": 7}
    Checkpoints(directory, world).save(1, tree, {}, {})


def load_sharded(world: OverGloo, directory: Path) -> None:
    empty = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    template = {"model": sharded(world, empty)}
    loaded = Checkpoints(directory, world).restore(template)
    assert loaded is not None
    for name, whole in WHOLE.items():
        tensor = loaded.state["model"][name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), whole), name
        assert torch.equal(template["model"][name].full_tensor(), whole), name
    assert torch.equal(loaded.state["replicated"], WHOLE["matrix"])
    assert loaded.state["plain"] == 7


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2)])
def test_shards_come_back_at_another_size(writers: int, readers: int, tmp_path: Path) -> None:
    run(writers, save_sharded, tmp_path)
    run(readers, load_sharded, tmp_path)
    loaded = Checkpoints(tmp_path, Alone()).restore()
    assert loaded is not None
    for name, whole in WHOLE.items():
        assert torch.equal(loaded.state["model"][name], whole), name


def test_replicated_comes_back_as_shards(tmp_path: Path) -> None:
    Checkpoints(tmp_path, Alone()).save(
        1, {"model": WHOLE, "replicated": WHOLE["matrix"], "plain": 7}, {}, {}
    )
    run(3, load_sharded, tmp_path)
