"""Tensors in safetensors files: DCP's planner assigns chunks to ranks, Shoal stores them.

A rank writes one file with the chunks of its plan. A JSON table has the dtype and shape of each tensor
and the file and key of each of its chunks. Files contain no pickled data.

A save uses only DCP's planning: a plan is computed once and reused until the form of the state
changes. Neither saving nor loading uses DCP's exchange between ranks, which unpickles the data of
other ranks.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shoal.checkpoint.paths import AnyPath, local_file
from shoal.checkpoint.state_tree import DTYPES
from shoal.checkpoint.store import DamageError

Table = dict[str, Any]

_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class WritePlan:
    """The chunks of tensors that this rank writes, and the place of each chunk of all ranks."""

    form: str
    """The form of the tensors, from `form_of`: tensors of the same form have the same plan."""
    items: list[WriteItem]
    table: Table


def form_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the inputs of a plan: names, shapes and dtypes, and how tensors are sharded."""
    text = "\n".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {_division(tensor)}"
        for name, tensor in tensors.items()
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _division(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    return f"{tensor.placements} {tensor.device_mesh.mesh.tolist()}"


def local_plan(tensors: Mapping[str, torch.Tensor], *, first: bool) -> SavePlan:
    """Return the plan of the tensors that this rank could write, DTensors by their shards."""
    return _planner(tensors, first=first).create_local_plan()


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def global_plan(form: str, plans: list[SavePlan], rank: int) -> WritePlan:
    """Return the plan of `rank` from the plans of all ranks; of several copies, one rank writes one.

    Every rank computes the same result from the same plans.
    """
    assigned, metadata = _planner({}, first=True).create_global_plan(plans)
    places = {
        item.index: {"file": file_of(number), "key": _key(item)}
        for number, plan in enumerate(assigned)
        for item in plan.items
    }
    return WritePlan(form, assigned[rank].items, _tabulate(metadata, places))


def chunks_of(plan: WritePlan, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the chunks that this rank writes, by their keys in its file."""
    planner = _planner(tensors, first=False)
    # The state passed to DCP holds only tensors.
    return {_key(item): cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items}


def _planner(tensors: Mapping[str, torch.Tensor], *, first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, first)
    return planner


def load_tensors(directory: AnyPath, table: Table, targets: dict[str, torch.Tensor]) -> None:
    """Fill `targets` in place; they may be sharded differently than the saved tensors.

    Each rank plans alone which parts it reads: DCP's exchange of the plans of all ranks does not change
    them, and it unpickles data of other ranks. Raises the errors of reading.
    """
    try:
        with _no_warning():
            load(
                dict(targets),
                storage_reader=ChunkReader(directory, table),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except CheckpointException as error:  # a BaseException
        ((cause, _),) = error.failures.values()
        raise cause from None


def allocate(
    row: Mapping[str, Any], like: torch.Tensor | None = None, device: str = "cpu"
) -> torch.Tensor:
    """Return an uninitialised tensor for one row of the table: sharded like `like`, or on `device`."""
    dtype = _DTYPE_NAMES[row["dtype"]]
    if isinstance(like, DTensor) and list(like.shape) == row["shape"]:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(row["shape"], dtype=dtype, device=device)


class ChunkReader(StorageReader):
    """Reads chunks of the tensors in `table` from the safetensors files of a directory."""

    def __init__(self, directory: AnyPath, table: Table) -> None:
        self._directory = directory
        self._table = table

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the directory was given before."""

    def read_metadata(self) -> Metadata:
        """Return dtype, shape and chunks of each tensor."""
        return Metadata({name: _metadata(row) for name, row in self._table.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: each rank has already read the table."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan: each rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans: no rank reads for another one."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned chunks into the planner's tensors."""
        self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, dict[str, Any]]]] = {}
        for item in plan.items:
            chunk = self.chunk(item.storage_index)
            by_file.setdefault(chunk["file"], []).append((item, chunk))
        for name, reads in by_file.items():
            with (
                local_file(self._directory / name) as path,
                safe_open(path, framework="pt", device="cpu") as file,
            ):
                for item, chunk in reads:
                    self._read_item(file, item, chunk, planner)

    def _read_item(
        self, file: Any, item: ReadItem, chunk: dict[str, Any], planner: LoadPlanner
    ) -> None:
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        spans = [(offset, offset + length) for offset, length in pairs]
        dtype = self._table[item.storage_index.fqn]["dtype"]
        value = read_piece(file, chunk["key"], chunk["sizes"], spans, dtype)
        target = planner.resolve_tensor(item).detach()
        target.copy_(value)
        planner.commit_tensor(item, target)

    def chunk(self, index: MetadataIndex) -> dict[str, Any]:
        """Return the row of a chunk in the table."""
        chunks: list[dict[str, Any]] = self._table[index.fqn]["chunks"]
        hint = index.index
        if hint is not None and torch.Size(chunks[hint]["offsets"]) == index.offset:
            return chunks[hint]
        return next(chunk for chunk in chunks if torch.Size(chunk["offsets"]) == index.offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP chooses this reader for no path by itself."""
        return False


def read_piece(
    file: Any, key: str, whole: Sequence[int], spans: Sequence[tuple[int, int]], dtype: str
) -> torch.Tensor:
    """Return a part of a chunk of `whole` sizes in an open file; `spans` are its limits in the chunk.

    Raises DamageError if the file holds another piece than the table says: copying it would convert
    or repeat its values.
    """
    sizes = [stop - start for start, stop in spans]
    if sizes == list(whole):
        value = file.get_tensor(key)
    else:
        value = file.get_slice(key)[tuple(slice(*span) for span in spans)]
    wanted = _DTYPE_NAMES[dtype]
    pair = (2,) if wanted.is_complex else ()
    if tuple(value.shape) != (*sizes, *pair) or value.dtype != wanted.to_real():
        held = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        raise DamageError(f"a file holds {held} in place of {dtype} {sizes}")
    return torch.view_as_complex(value) if wanted.is_complex else value


def _key(item: WriteItem) -> str:
    data = cast(TensorWriteData, item.tensor_data)  # as above
    chunk = data.chunk
    if chunk.sizes == data.size:
        return item.index.fqn
    # `#` is escaped in names, so no other tensor has this name.
    return f"{item.index.fqn}#{','.join(map(str, chunk.offsets))}"


def _tabulate(metadata: Metadata, places: Mapping[MetadataIndex, dict[str, str]]) -> Table:
    table: Table = {}
    for name, stored in metadata.state_dict_metadata.items():
        tensor = cast(TensorStorageMetadata, stored)  # as above
        table[name] = {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **places[MetadataIndex(name, chunk.offsets)],
                }
                for chunk in tensor.chunks
            ],
        }
    return table


def _metadata(row: Mapping[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_DTYPE_NAMES[row["dtype"]]),
        size=torch.Size(row["shape"]),
        chunks=[
            ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
            for chunk in row["chunks"]
        ],
    )


@contextmanager
def _no_warning() -> Iterator[None]:
    """Keep DCP from warning that it uses no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
