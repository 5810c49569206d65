"""A training on a disk that fails: it saves at every second step, and goes on where that fails."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

import shoal
from helpers.kill_in_save import Counted, HookedFiles
from helpers.pipeline_model import parts
from shoal.checkpoint import AnyPath, Checkpoints
from shoal.checkpoint.filesystem import FreeSpace
from shoal.checkpoint.state_tree import take_apart

EVERY, UNTIL = 2, 8
NEWEST = f"checkpoints/step-{UNTIL}"
FILES = ("manifest.json", "rank-0.safetensors", "rank-1.safetensors", "state.json")
PAGE = os.sysconf("SC_PAGESIZE")


def nothing(directory: Path, step: int) -> None:
    """A disk that is in order."""


class Refused(HookedFiles):
    """Refuses an operation during the save of one step."""

    def __init__(self, operation: str, code: int, step: int) -> None:
        super().__init__()
        self._operation, self._code, self._step = operation, code, step
        self._within = False

    def at(self, number: int, path: AnyPath | None) -> None:
        if path is not None:
            self._within = path.parent.name == f"step-{self._step}.partial"
        if self._within and self.names[number] == self._operation:
            # As from the system: a call on an open file names none.
            raise OSError(self._code, os.strerror(self._code), path and str(path))


class Unaware(Counted):
    """Does not ask how much room there is: what is too much shows when it is written."""

    def room(self, path: AnyPath) -> FreeSpace:
        return FreeSpace(None, None)

    def reserve(self, file: BinaryIO, size: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Training:
    """One attempt. Rank 0 calls `disturb(directory, step)` before each save; `files` are those of rank
    `victim`, or of all."""

    directory: Path
    disturb: Callable[[Path, int], object] = nothing
    victim: int | None = None
    files: HookedFiles = field(default_factory=Counted)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A save that failed: what was said, and the step of the checkpoint that was whole then."""

    error: shoal.CheckpointError
    whole: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What an attempt came to on one rank."""

    restored: int | None
    weights: list[Tensor]
    failed: dict[int, Failed]
    told: str


def train(world: shoal.World, training: Training) -> Ended:
    """Save at every second step, and go on where that fails."""
    step, data = parts(world, None)
    ema = shoal.EMA(step.model, decay=0.5)
    kept = training.directory / "checkpoints"
    files = training.files if training.victim in (None, world.rank) else Counted()
    failed: dict[int, Failed] = {}
    told = io.StringIO()
    with (
        contextlib.redirect_stdout(told),
        shoal.Run(training.directory, step, data, state={"ema": ema}) as run,
    ):
        run.files.checkpoints = Checkpoints(kept, world, files=files)
        restored = run.restore()
        for batch in data.epochs(9):
            step(batch)
            ema.update()
            run.tick()
            world.log({"rate": step.optimizer.param_groups[0]["lr"]})
            run.note("batch", {"text": "." * PAGE})  # a record that needs room, too
            if step.number % EVERY == 0:
                if world.is_rank_zero:
                    training.disturb(training.directory, step.number)
                try:
                    run.save()
                except shoal.CheckpointError as error:
                    whole = Checkpoints(kept, world).restore()
                    assert whole is not None
                    failed[step.number] = Failed(error=error, whole=whole.step)
            if step.number == UNTIL:
                break
    values = [*step.model.parameters(), *ema.state_dict()["averages"].values()]
    return Ended(
        restored=None if restored is None else restored.step,
        weights=[value.detach().clone() for value in values],
        failed=failed,
        told=told.getvalue(),
    )


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run with the checkpoints of steps 4, 6 and 8, and its end."""

    directory: Path
    ended: list[Ended]

    def assert_same(self, found: list[Ended]) -> None:
        for ours, theirs in zip(found, self.ended, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.weights, theirs.weights, strict=True))


def load(world: shoal.World, directory: Path) -> tuple[int, str, tuple[str, ...]]:
    """The step of the latest complete checkpoint, a digest of its tensors, and what was passed over."""
    loaded = Checkpoints(directory / "checkpoints", world).restore()
    assert loaded is not None
    digest = hashlib.sha256()
    for name, tensor in sorted(take_apart(loaded.state).tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    reasons = tuple(f"{one.path.name}: {one.reason}" for one in loaded.skipped)
    return loaded.step, digest.hexdigest(), reasons
