"""Directories `checkpoint-N` of the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.importing.accelerate import read_parts
from shoal.checkpoint.importing.deepspeed import read_deepspeed
from shoal.checkpoint.importing.foreign_state import (
    ORDER,
    RANDOM,
    ForeignState,
    read_file,
    read_json,
    scale_of,
    unreadable,
)

_STATE = "trainer_state.json"


def is_hf_trainer(path: Path) -> bool:
    """Return whether a directory is one of a Trainer."""
    return (path / _STATE).is_file()


def read_hf_trainer(path: Path) -> ForeignState:
    """Return the state in a `checkpoint-N`. Raises CheckpointError."""
    state = read_json(path / _STATE)
    step, epoch = state.get("global_step"), state.get("epoch")
    if type(step) is not int or not isinstance(epoch, int | float | None):
        raise unreadable(path / _STATE, "it has no global_step")
    if (path / "latest").exists():
        found = read_deepspeed(path)
        found.tool = "the Trainer with DeepSpeed"
    else:
        model, optimizer = read_parts(path, path / "optimizer.pt")
        scaler, schedule = path / "scaler.pt", path / "scheduler.pt"
        found = ForeignState(
            tool="the Trainer of transformers",
            model=model,
            optimizer=optimizer,
            schedule=read_file(schedule) if schedule.exists() else None,
            scale=scale_of(read_file(scaler)) if scaler.exists() else None,
            left=[RANDOM, ORDER],
        )
    found.step, found.epoch = step, epoch
    found.left.append("training_args.bin, callbacks and the log of the Trainer")
    return found
