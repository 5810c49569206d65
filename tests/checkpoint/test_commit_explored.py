"""Saves of one attempt while another takes the run over, in every order of their file operations."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from helpers.checkpoint_files import Alone
from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.kill_in_save import HookedFiles
from shoal.checkpoint import (
    AnyPath,
    Checkpoints,
    Fence,
    FencedFiles,
    fencing,
    manager,
)
from shoal.checkpoint.store import DamageError, Manifest, damage, manifest_of
from shoal.util.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

FIRST, OLD, NEW = range(3)
"""The saves: one before both attempts, then one of each attempt."""


@pytest.fixture(autouse=True)
def without_power_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing needs to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of which each execution makes a copy, with a checkpoint of step 1."""
    first = Checkpoints(tmp_path / "first" / "checkpoints", Alone(), keep=1)
    save_step(first, 1, FIRST)
    retire(first, 1)
    return tmp_path / "first"


UNSEEN = ("reserve", "sync", "sync_directory")
"""Operations that change nothing which another attempt could see."""


class ExploredFiles(FencedFiles, HookedFiles):
    """Each operation is a step of its own, which may come long after its check of the fence."""

    def __init__(self, world: Execution, fence: Fence) -> None:
        HookedFiles.__init__(self)
        FencedFiles.__init__(self, fence)
        self._world, self._attempts = world, fence

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._world.observe(self._attempts.newest())
        with super()._guarded():
            yield

    def at(self, number: int, path: AnyPath | None) -> None:
        if self.names[number] in UNSEEN:
            return
        label = f"{self.names[number]} {'' if path is None else path.name}"
        self._world.operate(label, lambda: None)

    def create(self, path: AnyPath) -> BinaryIO:
        with self._guarded():
            self._count("create", path)
            # A buffer would be written when the thread of a killed rank is unwound.
            return cast(BinaryIO, cast(Path, path).open("xb", buffering=0))


def save_step(checkpoints: Checkpoints, step: int, save: int) -> None:
    """Save, as a rank without others does; the checkpoint exists when this returns."""
    store = checkpoints._store
    store.expect(step)
    store.begin(step)
    try:
        record = store.write(step, "rank-0.safetensors", [bytes([save] * 8)])
        store.seal(step, Manifest(step, 1, save, {"rank-0.safetensors": record}))
    except Exception:
        store.discard(step)
        raise
    store.confirm(store.publish(step))


def retire(checkpoints: Checkpoints, step: int) -> None:
    """Remove older checkpoints."""
    checkpoints._verified.add(step)
    with suppress(UserWarning):  # about one that can't be removed
        checkpoints._retire(step)


def restored(checkpoints: Checkpoints) -> tuple[int, int]:
    """The step and the save of the latest complete checkpoint; -1 without one."""
    for path in checkpoints._store.candidates():
        try:
            manifest = manifest_of(path)
        except DamageError:
            continue
        if damage(path, manifest) is None:
            return manifest.step, manifest.info
    return -1, -1


def contents(root: Path) -> frozenset[tuple[str, bytes]]:
    return frozenset(
        (str(path.relative_to(root)), path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
        if path.parent.name != "attempts"
    )


def taken_over(first: Path, *, kills: int = 0, leftover: bool = False) -> Protocol:
    """An attempt saves step 2. Another one takes the run over at any time, and saves the next step.

    The old attempt may be killed, or continue with its operation at any later time. If that makes the
    save of the new one fail, it saves the step after. With `leftover`, an earlier attempt was killed
    while it wrote the manifest of step 2.
    """
    root = first.with_name("copy")
    there = root / "checkpoints"

    def begin(world: Execution) -> Callable[[bool], None]:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(first, root)
        if leftover:
            (there / "step-2.partial").mkdir()
            (there / "step-2.partial" / "manifest.json").write_text("{")
        world.outside = lambda: contents(root)
        world.mortal = {OLD}
        committed = [FIRST]
        failed: dict[int, Exception] = {}
        fences = {save: fencing.Fence(root / "attempts") for save in (OLD, NEW)}

        def attempt(save: int) -> None:
            fence = fences[save]
            world.block("start", lambda: save == OLD or fences[OLD].number > 0 or OLD in world.dead)
            fence.number = fence.take()
            found = Checkpoints(there, Alone(), keep=1, files=ExploredFiles(world, fence))
            try:
                found._survey(None)
                step, _ = restored(found)
                found._verified.add(step)
                try:
                    save_step(found, step + 1, save)
                except OSError:
                    step += 1
                    save_step(found, step + 1, save)
                committed.append(save)
                retire(found, step + 1)
            except (OSError, CheckpointError, DamageError) as error:
                failed[save] = error

        for save in (OLD, NEW):
            world.spawn(f"attempt {save}", save, partial(attempt, save))
        return partial(check_saves, world, there, committed, failed)

    return Protocol(begin=begin, kills=kills)


def check_saves(
    world: Execution, there: Path, committed: list[int], failed: dict[int, Exception], at_end: bool
) -> None:
    _, found = restored(Checkpoints(there, Alone()))
    if found < max(committed):
        raise BrokenPropertyError(f"save {max(committed)} is lost: a restore finds {found}")
    if NEW in failed:
        raise BrokenPropertyError(f"the new attempt failed: {failed[NEW]!r}")
    for task in world.tasks:
        if task.error is not None:
            raise BrokenPropertyError(f"{task.name}: {task.error!r}")
        if at_end and not task.ended:
            raise BrokenPropertyError(f"{task.name} waits forever")


@pytest.mark.full
@pytest.mark.parametrize(
    ("bounds", "states"),
    [
        ({"leftover": True}, 150),
        pytest.param({"leftover": True}, 663, marks=pytest.mark.long),
        pytest.param({}, 560, marks=pytest.mark.long),
        pytest.param({"kills": 1}, 1_131, marks=pytest.mark.long),
    ],
)
def test_no_committed_save_is_lost(bounds: dict[str, Any], states: int, run: Path) -> None:
    found = explore(taken_over(run, **bounds), states=150 if states == 150 else 10_000)
    print(found)
    assert not found.failure, found
    assert found.complete == (states > 150)
    assert found.states >= states


def retire_one_too_many(patch: pytest.MonkeyPatch) -> None:
    wrong = load_variant(manager, "else step < oldest", "else step <= oldest").Checkpoints
    patch.setattr(Checkpoints, "_retire", wrong._retire)


class KilledAtStep(HookedFiles):
    """Kills this process before a step of the exploration."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def at(self, number: int, path: AnyPath | None) -> None:
        if self.names[number] in UNSEEN:
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def save_and_die(root: Path, step: int, *, defect: bool) -> None:
    if defect:
        retire_one_too_many(pytest.MonkeyPatch())
    checkpoints = Checkpoints(root / "checkpoints", Alone(), keep=1, files=KilledAtStep(step))
    save_step(checkpoints, 2, OLD)
    retire(checkpoints, 2)


@pytest.mark.processes
@pytest.mark.full
def test_a_defect_is_found_and_its_schedule_replayed_on_a_process(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        retire_one_too_many(patched)
        found = explore(taken_over(run), states=2_000)
    print(found)
    assert found.failure
    assert set(found.schedule) == {f"attempt {OLD}"}
    steps = len(found.schedule) - 1  # after the start
    for defect in (True, False):
        root = run.with_name(f"real-{defect}")
        shutil.copytree(run, root)
        process = multiprocessing.get_context("forkserver").Process(
            target=save_and_die, args=(root, steps), kwargs={"defect": defect}
        )
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        latest = restored(Checkpoints(root / "checkpoints", Alone()))
        assert latest[1] == (FIRST if defect else OLD)
