"""Export of a checkpoint as a directory of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.checkpoint.inspect.extract import section, select_model
from shoal.checkpoint.inspect.manifest import CheckpointManifest, Reference
from shoal.checkpoint.inspect.tensor_reader import TensorFiles
from shoal.util.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class DCPExport:
    """The directory that was written, and its entries. `left` are those that were not written."""

    path: Path
    step: str
    tensors: int
    bytes: int
    entries: tuple[str, ...]
    left: tuple[str, ...]


def export_dcp(contents: CheckpointManifest, path: Path, *, step: str | None) -> DCPExport:
    """Write the model and the optimizer of a Step under the names of torch's `get_state_dict`.

    The entries are `model`, `optimizer`, `step` and, if the Step has one, `lr_scheduler`. `step` is the
    name of one of several Steps. Default: the first. The directory is complete when it appears.

    Raises CheckpointError if `path` exists, or the checkpoint has no such Step.
    """
    if path.exists():
        raise CheckpointError(
            given=f"shoal checkpoint export --format dcp … {path}",
            found="it exists, and DCP would mix its files with those that are there",
            fix="choose a new directory",
        )
    selected = select_model(contents, step=step, ema=None)
    with TensorFiles(contents) as values:
        tensors = []

        def read(tree: Any) -> Any:
            if isinstance(tree, Reference):
                tensors.append(tree.name)
                return values.whole(tree.name)
            if isinstance(tree, dict):
                return {key: read(item) for key, item in tree.items()}
            return type(tree)(map(read, tree)) if isinstance(tree, list | tuple) else tree

        model = {name: Reference("tensor", of) for name, of in selected.tensors.items()}
        tree = {
            "model": read(model),
            "optimizer": read(_as_torch(section(selected.state, "optimizer"))),
            "step": selected.state["number"],
        }
        if "schedule" in selected.state:
            tree["lr_scheduler"] = read(selected.state["schedule"])
        _save(tree, path)
    others = [*(key for key in ("scale", "engine") if selected.state.get(key)), *selected.left]
    others += [key for key in ("state", "loader", "means") if section(contents.state, key)]
    return DCPExport(
        path=path,
        step=selected.step,
        tensors=len(tensors),
        bytes=sum(contents.tensors[name].bytes for name in tensors),
        entries=tuple(tree),
        left=(*others, "random states"),
    )


def _as_torch(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with the names of the parameters in its groups."""
    members = optimizer.get("members", {})
    groups = [
        {**group, "params": [name for name, of in members.items() if of == number]}
        for number, group in enumerate(optimizer.get("groups", []))
    ]
    return {"state": optimizer.get("state", {}), "param_groups": groups}


def _save(tree: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            save(tree, storage_writer=FileSystemWriter(partial), no_dist=True)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
