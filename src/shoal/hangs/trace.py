"""What torch's flight recorder, or a process group of Shoal's own, knows of this process's collectives.

The recorder is on by default, for Gloo and for NCCL, and keeps the newest 2,000: operation, sizes,
dtypes and whether each has ended. Sending and receiving on Gloo are not in it; they only count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor
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


class Entry(NamedTuple):
    """A collective, when it was begun, in ns since 1970, and by which thread."""

    begun: int
    thread: str
    collective: Collective


Check = Callable[[dist.ProcessGroup, str, Sequence[Tensor], bool], None]
"""Compares a collective with those of the other ranks before it begins: `Matching.check`."""


@runtime_checkable
class Recording(Protocol):
    """A process group whose calls pass neither torch's flight recorder nor its dispatcher."""

    def recorded(self) -> list[Entry]:
        """What the recorder would know of it, oldest first."""
        ...

    def compare(self, check: Check) -> None:
        """Call `check` before each collective from now on."""
        ...

    def allow(self, seconds: float) -> None:
        """Give each operation that begins from now on so much time."""
        ...


def newest() -> int:
    """The number of the newest record; those of worlds that are over are not newer."""
    return max((entry["record_id"] for entry in _dumped()), default=-1)


def collectives(after: int) -> list[Collective]:
    """All recorded collectives, oldest first; of torch's records those with numbers above `after`."""
    return [entry.collective for entry in _entries(after)]


def outstanding(after: int, threads: Collection[str]) -> Collective | None:
    """The oldest collective that has not ended; those that `threads` began do not count."""
    for entry in _entries(after):
        if not entry.collective.done and entry.thread not in threads:
            return entry.collective
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


def _entries(after: int) -> list[Entry]:
    entries = [
        Entry(entry["time_created_ns"], entry["thread_id"], _read(entry))
        for entry in _dumped()
        if entry["record_id"] > after
    ]
    own = [entry for group in recording() for entry in group.recorded()]
    return sorted([*entries, *own], key=lambda entry: entry.begun) if own else entries


def recording() -> Iterator[Recording]:
    """The process groups of this process that keep their own records."""
    known: list[object] = list(dist.distributed_c10d._world.pg_names)
    return (group for group in known if isinstance(group, Recording))


def _dumped() -> list[Mapping[str, Any]]:
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
