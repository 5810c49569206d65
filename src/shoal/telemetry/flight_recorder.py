"""This process's collectives, from torch's flight recorder or one of Shoal's process groups.

The recorder is on by default, for Gloo and for NCCL, and keeps the newest 2,000: operation, sizes,
dtypes and whether each has ended. Sends and receives on Gloo are not in it; only their number is
known. Gloo never records durations, and NCCL only with TORCH_NCCL_ENABLE_TIMING=1.

Dumping the records holds Python's GIL, for some 15 ms with 2,000 of them; querying the progress of
each group takes microseconds.
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
"""Bytes per element; types that are not listed (float8, packed ones) have one."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a process group, the `number`-th, and whether it has ended on this rank.

    `tensors` describes its arguments, such as "float32[4]".
    """

    group: str
    number: int
    operation: str
    tensors: str
    done: bool

    def __str__(self) -> str:
        return f"{self.operation} of {self.tensors}" if self.tensors else self.operation


class CollectiveCall(NamedTuple):
    """One record of an operation, including sends and receives if they are recorded.

    `record` numbers the records of one `recorder`, without gaps. `number` is the count of the group,
    which `group_progress` knows as `key`. `sent` and `received` are the bytes of the tensors that go in
    and come out on this rank, if they are recorded. `seconds` is None if the recorder has no times.
    `begun` is its start in ns since 1970, `thread` the thread that began it. `collective` is None for a
    send or a receive for which no call waits.
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
    begun: int = 0
    thread: str = ""
    collective: Collective | None = None


class GroupProgress(NamedTuple):
    """The number of operations that a group has begun, and of those that have ended."""

    begun: int
    ended: int


Check = Callable[[dist.ProcessGroup, str, Sequence[Tensor], bool], None]
"""Compares a collective with those of the other ranks before it begins: `Matching.check`."""


@runtime_checkable
class RecordingGroup(Protocol):
    """A process group whose calls pass neither torch's flight recorder nor its dispatcher."""

    def calls(self) -> list[CollectiveCall]:
        """Return the records of all operations, oldest first."""

    def compare(self, check: Check) -> None:
        """Call `check` before each collective from now on."""

    def allow(self, seconds: float) -> None:
        """Set the timeout of each operation that begins from now on."""


def newest_records() -> dict[str, int]:
    """Return the number of each recorder's newest record, so that later records can be recognized."""
    found: dict[str, int] = {}
    for call in recorded_calls({}):
        found[call.recorder] = max(call.record, found.get(call.recorder, -1))
    return found


def recorded_collectives(after: Mapping[str, int]) -> list[Collective]:
    """Return the collectives that were recorded after these numbers, oldest first."""
    return [collective for _, collective in _collectives(after)]


def oldest_outstanding(after: Mapping[str, int], threads: Collection[str]) -> Collective | None:
    """Return the oldest collective that has not ended; those that `threads` began do not count."""
    for thread, collective in _collectives(after):
        if not collective.done and thread not in threads:
            return collective
    return None


def group_ranks() -> dict[str, list[int]]:
    """Return the process groups of this process by name, with their ranks in the world."""
    return {name: dist.get_process_group_ranks(group) for group, name in process_groups().items()}


def recorded_calls(after: Mapping[str, int]) -> list[CollectiveCall]:
    """Return the calls of each recorder, oldest first; for recorders in `after`, only later ones."""
    found = [
        _call(name, entry)
        for name, dump in recorder_dumps().items()
        for entry in _above(dump(), after.get(name, -1))
    ]
    for group in recording_groups():
        found += [call for call in group.calls() if call.record > after.get(call.recorder, -1)]
    return found


def group_progress() -> dict[str, GroupProgress]:
    """Return the progress of the groups over Gloo, by their keys.

    For NCCL's groups the recorder learns of it later than most collectives take.
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
    """Return the number of operations that each group has begun, including sends and receives."""
    return [operations_begun(group) for group in process_groups()]


def describe_tensors(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> str:
    """Return a string for tensors: "float32[4]", "float32[4] and 2 more"."""
    if not sizes:
        return ""
    text = f"{_DTYPES.get(dtypes[0], dtypes[0])}{list(sizes[0])}"
    return f"{text} and {len(sizes) - 1} more" if len(sizes) > 1 else text


def _collectives(after: Mapping[str, int]) -> list[tuple[str, Collective]]:
    """Return collectives with the threads that began them, oldest first."""
    calls = sorted(recorded_calls(after), key=lambda call: call.begun)
    return [(call.thread, call.collective) for call in calls if call.collective is not None]


def recording_groups() -> Iterator[RecordingGroup]:
    """Yield the process groups of this process that keep their own records."""
    known: list[object] = list(process_groups())
    return (group for group in known if isinstance(group, RecordingGroup))


def _above(text: bytes, number: int) -> list[Mapping[str, Any]]:
    """Return the entries of a dump with numbers above one; only these are parsed if possible.

    Entries contain no objects, so the end of an entry and of the list can be found.
    """
    known = text.rfind(b'"record_id":%d,' % number)
    if known >= 0:
        begin, end = text.find(b"},{", known), text.find(b"}]", known)
        text = b'{"entries":[%b]}' % text[begin + 2 : end + 1] if 0 <= begin < end else b"{}"
    return [entry for entry in json.loads(text).get("entries", []) if entry["record_id"] > number]


def _call(recorder: str, entry: Mapping[str, Any]) -> CollectiveCall:
    backend, _, operation = entry["profiling_name"].partition(":")
    took, group = entry.get("duration_ms"), entry["process_group"][0]
    done = entry["retired"] or entry["state"] == "completed"
    return CollectiveCall(
        recorder=recorder,
        record=entry["record_id"],
        backend=backend,
        group=group,
        key=str(entry["pg_id"]),
        number=entry["op_id"],
        operation=operation,
        sent=_size(entry["input_sizes"], entry["input_dtypes"]),
        received=_size(entry["output_sizes"], entry["output_dtypes"]),
        seconds=None if took is None else took / 1000,
        done=done,
        begun=entry["time_created_ns"],
        thread=entry["thread_id"],
        collective=Collective(
            group=group,
            number=entry["collective_seq_id"],
            operation=operation,
            tensors=describe_tensors(entry["input_sizes"], entry["input_dtypes"]),
            done=done,
        ),
    )


def _size(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    pairs = zip(sizes, dtypes, strict=True)
    return sum(math.prod(size) * _BYTES.get(dtype, 1) for size, dtype in pairs)
