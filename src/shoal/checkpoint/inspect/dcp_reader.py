"""Checkpoints as torch.distributed.checkpoint (DCP) reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shoal.checkpoint.inspect.locate import is_checkpoint
from shoal.checkpoint.inspect.manifest import CheckpointManifest, inspect_checkpoint
from shoal.checkpoint.inspect.tensor_reader import Values
from shoal.checkpoint.paths import path_from
from shoal.checkpoint.tensor_index import TensorEntry
from shoal.util.errors import CheckpointError


class DCPReader(StorageReader):
    """Reads the tensors of a checkpoint for `torch.distributed.checkpoint.load`.

        state = {"steps": {"step": {"model": model.state_dict()}}}
        reader = DCPReader("runs/a/checkpoints/step-100")
        torch.distributed.checkpoint.load(state, storage_reader=reader)

    Names are those of `shoal checkpoint show`: nested dicts as above, or one dict with dots in its keys
    where that prints slashes. DTensors may have other shards than those that were saved.
    The content of a file is verified before any tensor is read from it. Only tensors are read: DCP
    unpickles all other values, and a Shoal checkpoint holds no pickles. DCP raises an error of one rank
    as a CheckpointException on all ranks, whose text has that of the CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path_from(path)
        self._contents: CheckpointManifest
        self._names: dict[str, str]

    def read_metadata(self) -> Metadata:
        """Return dtype and shape of each tensor, as one chunk: `read_data` joins those of files."""
        if not is_checkpoint(self._path):
            raise CheckpointError(
                given=f"DCPReader({str(self._path)!r})",
                found="it is not the directory of a checkpoint",
                fix="give one like runs/a/checkpoints/step-100; shoal checkpoint ls runs/a names them",
            )
        self._contents = contents = inspect_checkpoint(self._path)
        self._names = {}
        for name in contents.tensors:
            key = _dcp_name(name)
            if key in self._names:
                raise CheckpointError(
                    given=f"DCPReader({str(self._path)!r})",
                    found=f"the tensors {self._names[key]} and {name}, which DCP both calls {key}",
                    fix="read it with shoal.Run.restore, or write the model to a file that "
                    "shoal.load reads: shoal checkpoint export",
                )
            self._names[key] = name
        return Metadata(
            {key: _tensor_metadata(contents.tensors[name]) for key, name in self._names.items()}
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the files that hold the planned tensors, then copy these into the state."""
        names = {self._names[item.storage_index.fqn] for item in plan.items}
        self._verify({chunk.file for name in names for chunk in self._contents.tensors[name].chunks})
        with Values(self._contents) as values:
            for item in plan.items:
                spans = [
                    (offset, offset + length)
                    for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
                ]
                target = planner.resolve_tensor(item).detach()
                target.copy_(values.part(self._names[item.storage_index.fqn], spans))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _verify(self, files: set[str]) -> None:
        path, records = self._contents.path, self._contents.manifest.files
        for file in sorted(files):
            if reason := records[file].difference(path / file):
                raise CheckpointError(
                    given=f"the checkpoint {path}",
                    found=f"{file} {reason}",
                    fix=f"shoal checkpoint verify {path}; shoal checkpoint ls names others",
                )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, if `load` was given its path as `checkpoint_id`."""
        if checkpoint_id is not None:
            self._path = path_from(os.fspath(checkpoint_id))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: `read_metadata` prepares each rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan: each rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans: no rank reads for another one."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP chooses this reader for no path by itself."""
        return False


def _dcp_name(name: str) -> str:
    keys = name.removeprefix("state/").split("/")
    return ".".join(key.replace("~1", "/").replace("~2", "#").replace("~0", "~") for key in keys)


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    size = torch.Size(entry.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )
