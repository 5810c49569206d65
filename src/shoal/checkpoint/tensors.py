"""Tensors in safetensors files: DCP's planner decides who writes and reads what, we store it.

A rank writes one file with the chunks that the plan gives it. A table, which is JSON, names each
tensor's dtype and shape and the file and key of each of its chunks. Nothing is pickled into files
or unpickled from them.

Nothing here raises inside DCP's exchange: it would send the error with its traceback, which not
every version of Python and torch can pickle, and a rank that can't leaves the others waiting.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shoal.checkpoint.state import DTYPES
from shoal.checkpoint.store import DamageError

Table = dict[str, Any]

_ALL = "tensors"
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Written:
    """What one rank's turn at writing came to; `outcome` is the caller's."""

    file: str
    outcome: Any


def save_tensors(
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    write: Callable[[dict[str, torch.Tensor]], Written],
    finish: Callable[[Callable[[], Table], list[Written]], Any],
) -> Any:
    """Save named tensors, DTensors by their shards, what several ranks hold only once.

    Collective. On every rank `write` gets the chunks that this rank is to write. Then rank 0 calls
    `finish` with a function that makes the table, and with what all ranks have written; what it
    returns is returned on all ranks. Neither may raise.
    """
    with _no_warning():
        metadata = save(
            {_ALL: tensors},
            storage_writer=_Writer(write, finish),
            planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    return metadata.storage_data


def load_tensors(
    directory: Path, table: Table, targets: dict[str, torch.Tensor], group: dist.ProcessGroup | None
) -> Exception | None:
    """Fill `targets`, which may be sharded otherwise than what was saved, in place.

    Collective. Returns what went wrong on this rank.
    """
    reader = _Reader(directory, table)
    with _no_warning():
        load(
            dict(targets),
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    return reader.failure


def allocate(
    row: Mapping[str, Any], like: torch.Tensor | None = None, device: str = "cpu"
) -> torch.Tensor:
    """An uninitialised tensor for one row of the table: divided as `like` is, else on `device`."""
    dtype = _DTYPE_NAMES[row["dtype"]]
    if isinstance(like, DTensor) and list(like.shape) == row["shape"]:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(row["shape"], dtype=dtype, device=device)


def serialize(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, block by block; one tensor at a time is on the CPU.

    https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header, the data
    without gaps. Wide dtypes come first, so that all are aligned. (The library's own writer leaves
    no way to hash and to sync what it writes.)
    """
    names = sorted(tensors, key=lambda name: (-_as_real(tensors[name]).element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        real = _as_real(tensors[name])
        start, end = end, end + real.numel() * real.element_size()
        header[name] = {
            "dtype": DTYPES[real.dtype],
            "shape": list(real.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = _as_real(tensors[name]).cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Planner(DefaultSavePlanner):
    """Unwraps the state: `save` spends 0.1 ms on each entry at the top, tensor or not."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(dict(state_dict[_ALL]), storage_meta, is_coordinator)


class _Writer(StorageWriter):
    def __init__(
        self,
        write: Callable[[dict[str, torch.Tensor]], Written],
        finish: Callable[[Callable[[], Table], list[Written]], Any],
    ) -> None:
        self._write = write
        self._finish = finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        chunks: dict[str, torch.Tensor] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            key = _key(item)
            # The state given to DCP holds tensors and nothing else.
            chunk = cast(torch.Tensor, planner.resolve_data(item))
            chunks[key] = chunk
            results.append(WriteResult(item.index, chunk.nbytes, key))
        written = self._write(chunks)
        # The first result is of the file, the others of its chunks.
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(written.file), 0, written), *results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # DCP hands this same object to every rank.
        metadata.storage_data = self._finish(
            lambda: _tabulate(metadata, results), [result[0].storage_data for result in results]
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class _Reader(StorageReader):
    def __init__(self, directory: Path, table: Table) -> None:
        self._directory = directory
        self._table = table
        self.failure: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _metadata(row) for name, row in self._table.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._read(plan, planner)
        except Exception as error:
            self.failure = error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[str, list[tuple[ReadItem, dict[str, Any]]]] = {}
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            by_file.setdefault(chunk["file"], []).append((item, chunk))
        for name, reads in by_file.items():
            with safe_open(self._directory / name, framework="pt", device="cpu") as file:
                for item, chunk in reads:
                    self._read_item(file, item, chunk, planner)

    def _read_item(
        self, file: Any, item: ReadItem, chunk: dict[str, Any], planner: LoadPlanner
    ) -> None:
        if list(item.lengths) == chunk["sizes"]:
            value = file.get_tensor(chunk["key"])
        else:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            parts = tuple(slice(offset, offset + length) for offset, length in spans)
            value = file.get_slice(chunk["key"])[parts]
        check_piece(value, item.lengths, self._table[item.storage_index.fqn]["dtype"])
        if _DTYPE_NAMES[self._table[item.storage_index.fqn]["dtype"]].is_complex:
            value = torch.view_as_complex(value)
        target = planner.resolve_tensor(item).detach()
        target.copy_(value)
        planner.commit_tensor(item, target)

    def _chunk(self, index: MetadataIndex) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = self._table[index.fqn]["chunks"]
        hint = index.index
        if hint is not None and torch.Size(chunks[hint]["offsets"]) == index.offset:
            return chunks[hint]
        return next(chunk for chunk in chunks if torch.Size(chunk["offsets"]) == index.offset)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def check_piece(value: torch.Tensor, sizes: Sequence[int], dtype: str) -> None:
    """Raise DamageError where a file holds another piece than the table says: copying would convert
    or repeat its values."""
    wanted = _DTYPE_NAMES[dtype]
    pair = (2,) if wanted.is_complex else ()
    if tuple(value.shape) != (*sizes, *pair) or value.dtype != wanted.to_real():
        raise DamageError(f"a file holds {_form(value)} in the place of {dtype} {list(sizes)}")


def _form(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _key(item: WriteItem) -> str:
    data = cast(TensorWriteData, item.tensor_data)  # as above
    chunk = data.chunk
    if chunk.sizes == data.size:
        return item.index.fqn
    # `#` is escaped in names, so this is nobody else's.
    return f"{item.index.fqn}#{','.join(map(str, chunk.offsets))}"


def _tabulate(metadata: Metadata, results: list[list[WriteResult]]) -> Table:
    places = {
        result.index: {"file": first.storage_data.file, "key": result.storage_data}
        for first, *rest in results
        for result in rest
    }
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
    """Keep DCP from warning that a world of one has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
