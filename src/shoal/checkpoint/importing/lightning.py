"""Checkpoints of Lightning: files that end in .ckpt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.importing.foreign_state import (
    ORDER,
    RANDOM,
    ForeignState,
    optimizer_of,
    read_file,
    scale_of,
    tensors_of,
    unreadable,
)
from shoal.checkpoint.importing.torch_file import plain_tree
from shoal.util.pickling import InertObject

_OWN = {
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    "loops",
    "optimizer_states",
    "lr_schedulers",
    "MixedPrecision",
    "hparams_name",
    "datamodule_hparams_name",
}


def is_lightning(path: Path) -> bool:
    """Return whether a path is one of a file of Lightning."""
    return path.suffix == ".ckpt" and path.is_file()


def read_lightning(path: Path) -> ForeignState:
    """Return the state in a checkpoint of Lightning. Raises CheckpointError."""
    found, others = read_file(path, _in_two)
    if not isinstance(found, Mapping) or "pytorch-lightning_version" not in found:
        raise unreadable(path, "it is not a checkpoint of Lightning")
    optimizers, schedules = (_list(found, name) for name in ("optimizer_states", "lr_schedulers"))
    if len(optimizers) > 1 or len(schedules) > 1:
        raise unreadable(
            path,
            f"it has {len(optimizers)} optimizers and {len(schedules)} schedules",
            "save one model with one optimizer; of several, import the weights: shoal.load",
        )
    return ForeignState(
        tool="Lightning",
        model=tensors_of(path, found.get("state_dict")),
        optimizer=optimizer_of(path, optimizers[0]) if optimizers else None,
        step=int(found["global_step"]),
        epoch=int(found["epoch"]),
        schedule=schedules[0] if schedules else None,
        scale=scale_of(found.get("MixedPrecision")),
        left=[RANDOM, ORDER, *(f"{key}: state of Lightning" for key in others)],
    )


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    return value if isinstance(value, list) else []


def _in_two(found: Any) -> tuple[Any, list[str]]:
    """Return the plain values of a file, and the names of what only Lightning can use."""
    items = found.items() if isinstance(found, Mapping) else ()
    others = [str(k) for k, v in items if k not in _OWN and (v or isinstance(v, InertObject))]
    return plain_tree(found), others
