"""The first checkpoint of a run, from the training state of another tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.disk_and_remote import store_in
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.importing import IMPORTED
from shoal.checkpoint.importing.foreign_state import ForeignState, steps_of, unreadable
from shoal.checkpoint.importing.sources import read_foreign
from shoal.checkpoint.lock import Lock
from shoal.checkpoint.state_tree import encode_checkpoint, safetensors_header
from shoal.checkpoint.store import Manifest, Store
from shoal.checkpoint.tensor_index import STATE
from shoal.util.clock import CLOCK
from shoal.util.errors import CheckpointError
from shoal.util.packages import versions
from shoal.util.safe_text import printable

_FILE = "rank-0.safetensors"


@dataclass(frozen=True, kw_only=True)
class ImportedCheckpoint:
    """The checkpoint that was written, and what it lacks."""

    path: Path
    tool: str
    step: int
    tensors: int
    bytes: int
    optimizer: str
    carried: tuple[str, ...]
    left: tuple[str, ...]


def import_checkpoint(source: Path, run: Path, *, step: int | None = None) -> ImportedCheckpoint:
    """Write the training state that another tool saved as the first checkpoint of a run directory.

    `step` is the number of optimizer steps, which not every tool records. Nothing from the source is
    executed. The checkpoint appears complete or not at all.

    Raises CheckpointError if the source can't be read, does not record its step or records another
    one, or the run directory has a checkpoint.
    """
    if run.exists() and source.exists() and run.samefile(source):
        raise CheckpointError(
            given=f"an import of {source} into itself",
            found="the run would be written between the files of the other tool",
            fix="choose a new run directory",
        )
    store = store_in((run / "checkpoints").absolute(), Files())
    _check_unused(run, store)
    found = read_foreign(source)
    if None not in (step, found.step) and step != found.step:
        raise unreadable(source, f"it is of step {found.step}, not {step}", "leave --step out")
    number = found.step if step is None else step
    if number is None:
        raise unreadable(
            source,
            "it does not record how many optimizer steps were taken",
            f"pass the number: shoal checkpoint import --step 1000 {source} {run}",
        )
    state = _state(found, number, source)
    info = {
        "time": CLOCK.wall(),
        "imported": state[IMPORTED],
        "versions": versions(),
        "config": {},
    }
    parts, own, described = encode_checkpoint(state, {}, info, 0)
    size = sum(tensor.nbytes for tensor in parts.tensors.values())
    lock = Lock(run / "lock")
    try:
        _check_unused(run, store)
        with _discarded_on_error(store, number):
            store.expect(number)
            store.begin(number, size, 1)
            records = {_FILE: store.write(number, _FILE, _blocks(parts.tensors))}
            table = {name: _row(name, tensor) for name, tensor in parts.tensors.items()}
            content = {"state": parts.json, "rank_state": [own.json], "tensors": table}
            text = json.dumps(content, separators=(",", ":"), allow_nan=False)
            records[STATE] = store.write(number, STATE, [text.encode()])
            store.seal(number, Manifest(number, 1, described, records))
        path = store.publish(number)
    finally:
        lock.release()
    return ImportedCheckpoint(
        path=run / "checkpoints" / path.name,
        tool=found.tool,
        step=number,
        tensors=len(parts.tensors),
        bytes=size,
        optimizer=_described(found.optimizer),
        carried=tuple(_carried(found)),
        left=tuple(state[IMPORTED]["left"]),
    )


def _check_unused(run: Path, store: Store[Any]) -> None:
    if there := store.candidates():
        raise CheckpointError(
            given=f"an import into {run}",
            found=f"it has checkpoints of a run (the latest: {there[0].name})",
            fix="choose a new run directory",
        )


def _state(found: ForeignState, number: int, source: Path) -> dict[str, Any]:
    left = list(found.left)
    if found.optimizer is None:
        left.append("state of the optimizer: the checkpoint has none")
    if found.schedule is None:
        left.append("schedule: the checkpoint has none")
    optimizer = found.optimizer or {"state": {}, "param_groups": []}
    step = {
        "model": found.model,
        "optimizer": {"state": optimizer["state"], "groups": optimizer["param_groups"]},
        "number": number,
        "engine": {},
    }
    for key, value in (("schedule", found.schedule), ("scale", found.scale)):
        if value is not None:
            step[key] = value
    imported = {
        "tool": found.tool,
        "from": str(source),
        "epoch": found.epoch,
        "left": [printable(each) for each in left],
    }
    return {"steps": {"step": step}, "state": {}, "loader": {}, IMPORTED: imported}


def _described(optimizer: Mapping[str, Any] | None) -> str:
    if optimizer is None:
        return ""
    by = "name" if any(isinstance(key, str) for key in optimizer["state"]) else "order"
    return f"{len(optimizer['state'])} parameters by {by}"


def _carried(found: ForeignState) -> Iterator[str]:
    if found.epoch is not None:
        yield f"epoch {found.epoch:.4g}"
    if found.schedule is not None:
        yield f"schedule at {found.schedule.get('last_epoch', steps_of(found.optimizer))}"
    if found.scale is not None:
        yield f"loss scale {found.scale['value']:g}"


def _blocks(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    real = {name: _real(tensor) for name, tensor in tensors.items()}
    header, places = safetensors_header({n: (t.dtype, t.shape, t.nbytes) for n, t in real.items()})
    flat = (real[name].contiguous().reshape(-1).view(torch.uint8) for name in places)
    return [header, *(tensor.numpy().data for tensor in flat if tensor.numel())]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _row(name: str, tensor: Tensor) -> dict[str, Any]:
    whole = [*tensor.shape]
    chunk = {"offsets": [0] * len(whole), "sizes": whole, "file": _FILE, "key": name}
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": whole,
        "chunks": [chunk],
    }


@contextmanager
def _discarded_on_error(store: Store[Any], step: int) -> Iterator[None]:
    try:
        yield
    except Exception:
        store.discard(step)
        raise
