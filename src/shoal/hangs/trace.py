"""What torch's flight recorder knows of this process's collectives.

It is on by default, for Gloo and for NCCL, and keeps the newest 2,000: operation, sizes, dtypes and
whether each has ended. Sending and receiving on Gloo are not in it; they only count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a process group, the `number`-th, and whether it has ended here.

    `tensors` says what it was called with, such as "float32[4]".
    """

    group: str
    number: int
    operation: str
    tensors: str
    done: bool

    def __str__(self) -> str:
        return f"{self.operation} of {self.tensors}" if self.tensors else self.operation


def newest() -> int:
    """The number of the newest record; those of worlds that are over are not newer."""
    return max((entry["record_id"] for entry in _entries()), default=-1)


def collectives(after: int) -> list[Collective]:
    """All recorded collectives with numbers above `after`, oldest first."""
    return [_read(entry) for entry in _entries() if entry["record_id"] > after]


def outstanding(after: int, threads: Collection[str]) -> Collective | None:
    """The oldest collective that has not ended; those that `threads` began do not count."""
    for entry in _entries():
        if entry["record_id"] > after and entry["thread_id"] not in threads:
            found = _read(entry)
            if not found.done:
                return found
    return None


def groups() -> dict[str, list[int]]:
    """The process groups of this process by name, with their ranks in the world."""
    world = dist.distributed_c10d._world
    return {world.pg_names[group]: list(world.pg_group_ranks[group]) for group in list(world.pg_names)}


def counts() -> list[int]:
    """How many operations each process group has begun, sending and receiving included."""
    known: list[Any] = list(dist.distributed_c10d._world.pg_names)
    return [group._get_sequence_number_for_group() for group in known]


def describe(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Tensors as people write them: "float32[4]", "float32[4] and 2 more"."""
    if not sizes:
        return ""
    text = f"{_DTYPES.get(dtypes[0], dtypes[0])}{list(sizes[0])}"
    return f"{text} and {len(sizes) - 1} more" if len(sizes) > 1 else text


def _entries() -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            found += json.loads(dump()).get("entries", [])
    return found


def _read(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"].partition(":")[2],
        tensors=describe(entry["input_sizes"], entry["input_dtypes"]),
        done=entry["retired"] or entry["state"] == "completed",
    )
