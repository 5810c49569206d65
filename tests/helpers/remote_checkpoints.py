"""Checkpoints at URLs: saved by attempts, restored with all looked at; failures at an operation."""

from __future__ import annotations

from typing import Any

import torch

from helpers.checkpoint_files import Alone
from shoal.checkpoint import AnyPath, Checkpoints, Fence, FencedFiles, Files
from shoal.checkpoint.commit import store_in
from shoal.checkpoint.store import damage, manifest_of

NUMBERS = 700


def state(version: int) -> dict[str, Any]:
    return {"version": version, "weight": torch.full((NUMBERS,), float(version))}


def begin(place: AnyPath, keep: int = 10, number: int | None = None) -> Checkpoints:
    """As a Run does: by the next attempt, or one of a `number`."""
    fence = Fence(place / "attempts")
    fence.number = fence.take() if number is None else number
    return Checkpoints(place / "checkpoints", Alone(), keep=keep, files=FencedFiles(fence))


def save(checkpoints: Checkpoints, *steps: int, version: int = 0) -> None:
    for step in steps:
        checkpoints.save(step, state(version or step), {"rank": 0}, {"at": step})


def restored(place: AnyPath) -> tuple[int, int]:
    """The step and the version of what is restored, all of it having been looked at."""
    loaded = Checkpoints(place / "checkpoints", Alone()).restore()
    assert loaded is not None
    version = loaded.state["version"]
    assert torch.equal(loaded.state["weight"], state(version)["weight"])
    return loaded.step, version


def damaged(place: AnyPath) -> list[str]:
    """What is listed as a checkpoint and is not whole."""
    found = store_in(place / "checkpoints", Files()).candidates()
    return [path.name for path in found if damage(path, manifest_of(path)) is not None]


def names(place: AnyPath) -> list[str]:
    return sorted(path.name for path in (place / "checkpoints").iterdir())


class DeadError(BaseException):
    """The process is no more: whatever it would do, it does not."""


class Failing:
    """Fails at operation `number`, and after it if the process is dead then."""

    def __init__(self, number: int | None, error: BaseException) -> None:
        self.done: list[str] = []
        self._number = number
        self._error = error

    def __call__(self, operation: str, key: str) -> None:
        self.done.append(operation)
        if self._number is None:
            return
        at = len(self.done) - 1
        if at == self._number or (isinstance(self._error, DeadError) and at > self._number):
            raise self._error
