"""What torch's flight recorder, or a process group of Shoal's own, knows of this process's collectives.

The recorder is on by default, for Gloo and for NCCL, and keeps the newest 2,000: operation, sizes,
dtypes and whether each has ended. Sending and receiving on Gloo are not in it; they only count. How
long each took Gloo never records, and NCCL with TORCH_NCCL_ENABLE_TIMING=1 only.

Writing the records out keeps Python's lock, for some 15 ms where there are 2,000; asking how far each
group has come takes microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from shoal._torch.c10d import operations_begun, process_groups, recorder_dumps

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
_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "ComplexHalf"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Of an element; those that are not here (float8, packed ones) have one."""


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


class CollectiveEntry(NamedTuple):
    """A collective, when it was begun, in ns since 1970, and by which thread."""

    begun: int
    thread: str
    collective: Collective


class CollectiveCall(NamedTuple):
    """One operation, sends and receives included where they are recorded, as traffic counts it.

    `record` numbers what one `recorder` has recorded, without gaps; `number` is the count of the group,
    which `group_progress` knows as `key`.
    `sent` and `received` are the bytes of the tensors that go in and come out on this rank, as far as
    they are recorded. `seconds` are None where the recorder knows no times.
    """

    recorder: str
    record: int
    backend: str
    group: str
    key: str
    number: int
    operation: str
    sent: int
    received: int
    seconds: float | None
    done: bool


class GroupProgress(NamedTuple):
    """How many operations a group has begun, and how many of them have ended."""

    begun: int
    ended: int


Check = Callable[[dist.ProcessGroup, str, Sequence[Tensor], bool], None]
"""Compares a collective with those of the other ranks before it begins: `Matching.check`."""


@runtime_checkable
class RecordingGroup(Protocol):
    """A process group whose calls pass neither torch's flight recorder nor its dispatcher."""

    def recorded(self) -> list[CollectiveEntry]:
        """What the recorder would know of it, oldest first."""

    def calls(self) -> list[CollectiveCall]:
        """The same as traffic counts it, oldest first."""

    def compare(self, check: Check) -> None:
        """Call `check` before each collective from now on."""

    def allow(self, seconds: float) -> None:
        """Give each operation that begins from now on so much time."""


def newest_records() -> dict[str, int]:
    """Return the number of each recorder's newest record; those of earlier worlds are not newer."""
    return {
        name: max((entry["record_id"] for entry in entries), default=-1)
        for name, entries in _dumped().items()
    }


def recorded_collectives(after: Mapping[str, int]) -> list[Collective]:
    """Return all recorded collectives, oldest first; of each recorder those above its number."""
    return [entry.collective for entry in _entries(after)]


def oldest_outstanding(after: Mapping[str, int], threads: Collection[str]) -> Collective | None:
    """Return the oldest collective that has not ended; those that `threads` began do not count."""
    for entry in _entries(after):
        if not entry.collective.done and entry.thread not in threads:
            return entry.collective
    return None


def group_ranks() -> dict[str, list[int]]:
    """The process groups of this process by name, with their ranks in the world."""
    return {name: dist.get_process_group_ranks(group) for group, name in process_groups().items()}


def recorded_calls(after: Mapping[str, int]) -> list[CollectiveCall]:
    """What each recorder has, oldest first; of one that `after` names, what it recorded later."""
    found = [
        _call(name, entry)
        for name, dump in recorder_dumps().items()
        for entry in _above(dump(), after.get(name, -1))
    ]
    for group in recording_groups():
        found += [call for call in group.calls() if call.record > after.get(call.recorder, -1)]
    return found


def group_progress() -> dict[str, GroupProgress]:
    """How far the groups over Gloo have come, by their keys.

    Of NCCL's groups the recorder learns that with a delay longer than most collectives.
    """
    dump = recorder_dumps().get("_dump_fr_trace_json")
    if dump is None:
        return {}
    found = json.loads(dump(includeCollectives=False))["pg_status"]
    return {
        key: GroupProgress(
            int(each["last_enqueued_collective"]), int(each["last_completed_collective"])
        )
        for key, each in found.items()
    }


def operation_counts() -> list[int]:
    """How many operations each process group has begun, sending and receiving included."""
    return [operations_begun(group) for group in process_groups()]


def describe_tensors(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Tensors as people write them: "float32[4]", "float32[4] and 2 more"."""
    if not sizes:
        return ""
    text = f"{_DTYPES.get(dtypes[0], dtypes[0])}{list(sizes[0])}"
    return f"{text} and {len(sizes) - 1} more" if len(sizes) > 1 else text


def _entries(after: Mapping[str, int]) -> list[CollectiveEntry]:
    entries = [
        CollectiveEntry(entry["time_created_ns"], entry["thread_id"], _read(entry))
        for name, found in _dumped().items()
        for entry in found
        if entry["record_id"] > after.get(name, -1)
    ]
    entries += [entry for group in recording_groups() for entry in group.recorded()]
    return sorted(entries, key=lambda entry: entry.begun)


def recording_groups() -> Iterator[RecordingGroup]:
    """The process groups of this process that keep their own records."""
    known: list[object] = list(process_groups())
    return (group for group in known if isinstance(group, RecordingGroup))


def _dumped() -> dict[str, list[Mapping[str, Any]]]:
    return {name: json.loads(dump()).get("entries", []) for name, dump in recorder_dumps().items()}


def _above(text: bytes, number: int) -> list[Mapping[str, Any]]:
    """The entries of a dump with numbers above one: no others are parsed where that one is still there.

    Entries have no objects inside, so that what ends one and the list of them can be found.
    """
    known = text.rfind(b'"record_id":%d,' % number)
    if known >= 0:
        begin, end = text.find(b"},{", known), text.find(b"}]", known)
        text = b'{"entries":[%b]}' % text[begin + 2 : end + 1] if 0 <= begin < end else b"{}"
    return [entry for entry in json.loads(text).get("entries", []) if entry["record_id"] > number]


def _call(recorder: str, entry: Mapping[str, Any]) -> CollectiveCall:
    backend, _, operation = entry["profiling_name"].partition(":")
    took = entry.get("duration_ms")
    return CollectiveCall(
        recorder=recorder,
        record=entry["record_id"],
        backend=backend,
        group=entry["process_group"][0],
        key=str(entry["pg_id"]),
        number=entry["op_id"],
        operation=operation,
        sent=_size(entry["input_sizes"], entry["input_dtypes"]),
        received=_size(entry["output_sizes"], entry["output_dtypes"]),
        seconds=None if took is None else took / 1000,
        done=entry["retired"] or entry["state"] == "completed",
    )


def _size(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    pairs = zip(sizes, dtypes, strict=True)
    return sum(math.prod(size) * _BYTES.get(dtype, 1) for size, dtype in pairs)


def _read(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"].partition(":")[2],
        tensors=describe_tensors(entry["input_sizes"], entry["input_dtypes"]),
        done=entry["retired"] or entry["state"] == "completed",
    )
