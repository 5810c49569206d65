"""Directories of torch.distributed.checkpoint (DCP), of FSDP1 and FSDP2, read without unpickling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.importing.foreign_state import (
    ORDER,
    RANDOM,
    ForeignState,
    optimizer_of,
    reading,
    steps_of,
    tensors_of,
    unreadable,
)
from shoal.checkpoint.importing.torch_file import (
    KNOWN,
    Bytes,
    plain_tree,
    read_torch_bytes,
)
from shoal.checkpoint.paths import open_file
from shoal.checkpoint.store import FileRecord
from shoal.checkpoint.tensor_index import TensorEntry, rows
from shoal.util.pickling import InertObject, read_inert

METADATA = ".metadata"
_FILE = re.compile(r"\w[\w.-]*", re.ASCII)
_MODELS = ("model", "state_dict", "module")
_OPTIMIZERS = ("optimizer", "optim", "optimizers")
_SCHEDULES = ("lr_scheduler", "scheduler", "schedule", "lr_schedulers")
_STEPS = ("step", "global_step", "iteration", "steps")


def is_dcp(path: Path) -> bool:
    """Return whether a directory is one of DCP."""
    return (path / METADATA).is_file()


def read_dcp(path: Path, *, model: bool = True) -> ForeignState:
    """Return the state in a directory of DCP. Without `model`, it need not have one.

    Raises CheckpointError.
    """
    with reading(path):
        tree = _Directory(path).tree()
    optimizer = _optimizer(path, tree)
    weights = _model(path, tree, optimizer) if model else {}
    read = {id(optimizer), id(weights)}
    others = {
        name: value
        for name, value in _named(tree)
        if name in (*_SCHEDULES, *_STEPS, "epoch", "train_state") and id(value) not in read
    }
    schedule = next((others[name] for name in _SCHEDULES if name in others), None)
    found = ForeignState(
        tool="torch.distributed.checkpoint",
        model=weights,
        optimizer=None if optimizer is None else optimizer_of(path, _by_name(optimizer)),
        schedule=schedule if isinstance(schedule, dict) and "last_epoch" in schedule else None,
        left=[RANDOM, ORDER],
    )
    steps = steps_of(found.optimizer)
    found.step = next((int(others[n]) for n in _STEPS if n in others and _is_count(others[n])), steps)
    epoch = others.get("epoch")
    found.epoch = int(epoch) if _is_count(epoch) else None  # type: ignore[arg-type]
    known = {*_MODELS, *_OPTIMIZERS, *_SCHEDULES, *_STEPS, "epoch", "app", "train_state"}
    rest = [name for name in tree if name not in known and name not in weights]
    if rest:
        found.left.append(f"{', '.join(map(str, rest))}: other state of the script")
    return found


class _Directory:
    """The metadata of a directory of DCP as data, and the values that they describe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_file(path / METADATA) as file:
            metadata = read_inert(file.read(), KNOWN).state
        self._paths: Mapping[str, tuple[Any, ...]] = metadata["planner_data"] or {}
        self._described: Mapping[str, InertObject] = metadata["state_dict_metadata"]
        self._places: dict[tuple[Any, Any], dict[str, Any]] = {}
        for index, info in metadata["storage_data"].items():
            at, place = index.state, info.state
            if not _FILE.fullmatch(place["relative_path"]):
                raise ValueError(f"it names the file {place['relative_path']!r}")
            if place.get("transform_descriptors"):
                raise ValueError("its tensors are compressed")
            offset = at.get("offset")
            self._places[at["fqn"], None if offset is None else tuple(offset)] = place
        self._files: dict[str, Bytes] = {}
        self._rows = self._table()

    def tree(self) -> dict[Any, Any]:
        """Return the saved state, with its tensors whole."""
        tree: dict[Any, Any] = {}
        for name in self._described:
            value = self._tensor(name) if name in self._rows else self._value(name)
            if isinstance(value, InertObject):
                continue
            node = tree
            *above, last = self._paths.get(name) or (name,)
            for key in above:
                node = node.setdefault(key, {})
            node[last] = value
        return tree

    def _table(self) -> dict[str, TensorEntry]:
        """Return the table of the tensors, checked as that of a checkpoint is."""
        table: dict[str, Any] = {}
        for name, described in self._described.items():
            if "chunks" not in (described.state or {}):
                continue
            dtype = str(described.state["properties"].state[0]).removeprefix("torch.")
            chunks = [
                {
                    "offsets": [*chunk.state["offsets"]],
                    "sizes": [*chunk.state["sizes"]],
                    "file": self._places[name, chunk.state["offsets"]]["relative_path"],
                    "key": name,
                }
                for chunk in described.state["chunks"]
            ]
            table[name] = {"dtype": dtype, "shape": [*described.state["size"]], "chunks": chunks}
        names = {place["relative_path"] for place in self._places.values()}
        records = {name: FileRecord((self._path / name).stat().st_size, "") for name in names}
        return rows({"tensors": table}, records)

    def _tensor(self, name: str) -> Tensor:
        row = self._rows[name]
        whole = torch.empty(row.shape, dtype=getattr(torch, row.dtype))
        for chunk in row.chunks:
            piece = read_torch_bytes(self._bytes(self._places[name, chunk.offsets]))
            if piece.dtype != whole.dtype or tuple(piece.shape) != chunk.sizes:
                raise ValueError(f"{chunk.file} holds another piece of {name} than it should")
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in spans)] = piece
        return whole

    def _value(self, name: str) -> Any:
        return plain_tree(read_torch_bytes(self._bytes(self._places[name, None])))

    def _bytes(self, place: Mapping[str, Any]) -> Bytes:
        name = place["relative_path"]
        if name not in self._files:
            open_file(self._path / name).close()  # a link or a pipe raises an error
            self._files[name] = np.memmap(self._path / name, dtype=np.uint8, mode="c")
        start, length = place["offset"], place["length"]
        found = self._files[name][start : start + length]
        if start < 0 or len(found) != length:
            raise ValueError(f"{name} is truncated")
        return found


def _named(tree: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a state: of its root, and of an object that holds the others."""
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict) and (key in ("app", "train_state") or len(tree) == 1):
            yield from value.items()


def _optimizer(path: Path, tree: Mapping[Any, Any]) -> dict[Any, Any] | None:
    found = [value for name, value in _named(tree) if name in _OPTIMIZERS and isinstance(value, dict)]
    if len(found) > 1:
        raise unreadable(
            path, "it has several optimizers", "of several models, import the weights: shoal.load"
        )
    return found[0] if found else None


def _model(path: Path, tree: Mapping[Any, Any], optimizer: object) -> dict[str, Tensor]:
    for name, value in _named(tree):
        if name in _MODELS and isinstance(value, dict):
            return tensors_of(path, value)
    if any(isinstance(value, Tensor) for value in tree.values()):  # as torchtitan saves
        return tensors_of(path, tree)
    raise unreadable(
        path,
        f"it has no entry of a model ({', '.join(_MODELS)}); it has {', '.join(map(str, tree)) or '-'}",
        "save {'model': …, 'optimizer': …}, as get_state_dict returns them",
    )


def _by_name(optimizer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the state of an optimizer as torch has it, also of `flatten_optimizer_state_dict`."""
    if "param_groups" in optimizer or "state" in optimizer:
        groups = optimizer.get("param_groups", [])
        if isinstance(groups, dict):  # a list in the metadata
            groups = [groups[number] for number in sorted(groups)]
        return {"state": optimizer.get("state", {}), "param_groups": groups}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in optimizer.items():
        part, _, rest = str(key).partition(".")
        name, _, entry = rest.rpartition(".")
        {"state": state, "param_groups": options}.get(part, {}).setdefault(name, {})[entry] = value
    return {
        "state": state,
        "param_groups": [{**each, "params": [name]} for name, each in options.items()],
    }


def _is_count(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return type(value) is int
