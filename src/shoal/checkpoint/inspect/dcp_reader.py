"""Checkpoints as torch.distributed.checkpoint (DCP) reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from shoal.checkpoint.inspect.locate import is_checkpoint
from shoal.checkpoint.inspect.manifest import inspect_checkpoint
from shoal.checkpoint.paths import path_from
from shoal.checkpoint.store import FileRecord
from shoal.checkpoint.tensors import ChunkReader
from shoal.util.errors import CheckpointError


class DCPReader(ChunkReader):
    """Reads the tensors of a checkpoint for `torch.distributed.checkpoint.load`.

        state = {"steps": {"step": {"model": model.state_dict()}}}
        reader = DCPReader("runs/a/checkpoints/step-100")
        torch.distributed.checkpoint.load(state, storage_reader=reader)

    Names are those of `shoal checkpoint show`: nested dicts as above, or one dict with dots in its keys
    where that prints slashes. DTensors may have other shards than those that were saved.
    A file is verified before any tensor is read from it. Only tensors are read: DCP
    unpickles all other values, and a Shoal checkpoint holds no pickles. DCP raises an error of one rank
    as a CheckpointException on all ranks, whose message contains the CheckpointError's.

    Args:
        path: Directory or URL of the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path_from(path), {})
        self._files: Mapping[str, FileRecord] = {}
        self._error: CheckpointError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, if `load` was given its path as `checkpoint_id`."""
        if checkpoint_id is not None:
            self._directory = path_from(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Return dtype, shape and chunks of each tensor, by DCP's names.

        Some versions of DCP replace an error of this method with their own, so that of a checkpoint
        that cannot be read is kept for `set_up_storage_reader`, which DCP calls next.
        """
        self._error = None
        try:
            self._inspect()
        except CheckpointError as error:
            self._error, self._table = error, {}
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Raise the CheckpointError of a checkpoint that cannot be read."""
        if self._error is not None:
            raise self._error
        super().set_up_storage_reader(metadata, is_coordinator)

    def _inspect(self) -> None:
        """Read the manifest and the table of tensors. Raises CheckpointError."""
        path, given = self._directory, f"DCPReader({str(self._directory)!r})"
        if not is_checkpoint(path):
            raise CheckpointError(
                given=given,
                found="it is not the directory of a checkpoint",
                fix="pass a path such as runs/a/checkpoints/step-100; list the checkpoints with shoal "
                "checkpoint ls runs/a",
            )
        contents = inspect_checkpoint(path)
        names: dict[str, str] = {}
        for name in contents.tensors:
            other = names.setdefault(_dcp_name(name), name)
            if other != name:
                raise CheckpointError(
                    given=given,
                    found=f"DCP has the same name, {_dcp_name(name)}, for {other} and {name}",
                    fix="use shoal checkpoint export, which writes the model to a file without DCP's "
                    "names",
                )
        self._files = contents.manifest.files
        self._table = {key: asdict(contents.tensors[name]) for key, name in names.items()}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the files of the planned chunks, then read these. Raises CheckpointError."""
        for file in sorted({self.chunk(item.storage_index)["file"] for item in plan.items}):
            if reason := self._files[file].difference(self._directory / file):
                raise CheckpointError(
                    given=f"the checkpoint {self._directory}",
                    found=f"{file} {reason}",
                    fix=f"read another checkpoint: shoal checkpoint ls {self._directory.parent} lists "
                    "them",
                )
        return super().read_data(plan, planner)


def _dcp_name(name: str) -> str:
    keys = name.removeprefix("state/").split("/")
    return ".".join(key.replace("~1", "/").replace("~2", "#").replace("~0", "~") for key in keys)
