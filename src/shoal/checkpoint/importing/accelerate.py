"""Directories of `Accelerator.save_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.checkpoint.importing import dcp, deepspeed
from shoal.checkpoint.importing.foreign_state import (
    ORDER,
    RANDOM,
    ForeignState,
    optimizer_of,
    read_file,
    read_model,
    scale_of,
    steps_of,
    unreadable,
)

_SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
_DEEPSPEED = "pytorch_model"


def is_accelerate(path: Path) -> bool:
    """Return whether a directory is one of `save_state`."""
    return bool(list(path.glob("random_states_*.pkl")))


def read_accelerate(path: Path) -> ForeignState:
    """Return the state in a directory of `save_state`. Raises CheckpointError."""
    if (path / _DEEPSPEED).is_dir():
        found = deepspeed.read_deepspeed(path / _DEEPSPEED)
        found.tool = "Accelerate with DeepSpeed"
        return found
    if list(path.glob("optimizer_1.*")) or (path / "model_1.safetensors").exists():
        raise unreadable(
            path,
            "it has several models or optimizers",
            "save one model with one optimizer; of several, import the weights: shoal.load",
        )
    model, optimizer = read_parts(path, path / "optimizer.bin")
    processes = len(list(path.glob("random_states_*.pkl")))
    step = steps_of(optimizer)
    left = [RANDOM, ORDER, *_others(path)]
    schedule: dict[str, Any] | None = None
    if (path / "scheduler.bin").exists():
        schedule = read_file(path / "scheduler.bin")
        if processes > 1 and step and schedule.get("last_epoch") == step * processes:
            # It takes a step for each process; Shoal's take one for each optimizer step.
            schedule = {"last_epoch": step}
            left.append(
                f"arguments of the schedule, which Accelerate stepped {processes} times in a step: it "
                f"continues at step {step} of the one in the script"
            )
    scaler = path / "scaler.pt"
    return ForeignState(
        tool="Accelerate",
        model=model,
        optimizer=optimizer,
        step=step,
        schedule=schedule,
        scale=scale_of(read_file(scaler)) if scaler.exists() else None,
        left=left,
    )


def read_parts(path: Path, optimizer: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return model and optimizer: of a directory with plain files, or with the shards of FSDP."""
    model, shards = (path / name for name in _SHARDED)
    if model.is_dir():
        found = dcp.read_dcp(model)
        if shards.is_dir():
            found.optimizer = dcp.read_dcp(shards, model=False).optimizer
        elif optimizer.exists():
            found.optimizer = optimizer_of(optimizer, read_file(optimizer))
        return found.model, found.optimizer
    read = optimizer_of(optimizer, read_file(optimizer)) if optimizer.exists() else None
    return read_model(path), read


def _others(path: Path) -> list[str]:
    names = sorted(
        each.name for each in path.iterdir() if each.name.startswith(("custom_checkpoint_", "dl_state"))
    )
    return [f"{', '.join(names)}: objects registered by the script"] if names else []
