"""Base of the process group over MPI: its ranks, records and limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.distributed.mpi import buffers
from shoal.distributed.mpi.work import Operation, OperationRecord, ProgressThread
from shoal.telemetry.flight_recorder import (
    Check,
    Collective,
    CollectiveCall,
    describe_tensors,
)

_REMEMBERED = 2000
"""The same number as torch's flight recorder keeps."""

Statuses = Sequence[MPI.Status]
Finish = Callable[[Statuses], None]


class SharedState:
    """The state that the process groups of one world share: the thread and the check of collectives."""

    def __init__(self) -> None:
        self.mover = ProgressThread()
        self.check: Check | None = None
        self.groups = 0


_ProcessGroup: Any = dist.ProcessGroup
"""Untyped, since torch calls each method in one of the two ways that it declares."""


class GroupMembers(_ProcessGroup):  # type: ignore[misc]
    """The ranks of two communicators: one for collectives, one for messages with the user's tags.

    An operation fails after `limit` seconds. Communicators are not freed, since that is collective, and
    a rank that fails must be able to leave alone.
    """

    def __init__(
        self,
        shared: SharedState,
        collectives: MPI.Intracomm,
        messages: MPI.Intracomm,
        *,
        limit: float,
    ) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._shared = shared
        self._collectives = collectives
        self._messages = messages
        self._limit = limit
        self._rank, self._size = collectives.rank, collectives.size
        self._number = self._begun = 0
        self._name = ""
        self._records: deque[OperationRecord] = deque(maxlen=_REMEMBERED)
        shared.groups += 1

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name. torch's base class keeps it in backends, which this group lacks."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which torch finds the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torch shows."""
        return "mpi"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def calls(self) -> list[CollectiveCall]:
        """Return the records of the newest collectives, sends and receives, oldest first."""
        return [self._call(each) for each in list(self._records)]

    def _call(self, record: OperationRecord) -> CollectiveCall:
        listed = record.number or (record.awaited and not record.done)
        size, scatters = record.size, record.operation.endswith("scatter")
        return CollectiveCall(
            recorder=f"mpi {self.group_name}",
            record=record.index,
            backend="mpi",
            group=self.group_name,
            key="",
            number=record.number,
            operation=record.operation,
            sent=0 if scatters else size,
            received=size if scatters else 0,
            seconds=(record.ended - record.begun) / 1e9 if record.done else None,
            done=record.done,
            begun=record.begun,
            thread=record.thread,
            collective=self._described(record) if listed else None,
        )

    def _described(self, record: OperationRecord) -> Collective:
        return Collective(
            group=self.group_name if record.number else "",
            number=record.number,
            operation=record.operation,
            tensors=describe_tensors(record.shapes, record.dtypes),
            done=record.done,
        )

    def compare(self, check: Check) -> None:
        """Call `check` before each collective of this world from now on."""
        self._shared.check = check

    def allow(self, seconds: float) -> None:
        """Set the time limit of operations that begin from now on."""
        self._limit = seconds

    def shutdown(self) -> None:
        """Leave the group; with the last group of a world the thread ends."""
        self._shared.groups -= 1
        if not self._shared.groups:
            self._shared.mover.stop()

    def _ready(self, operation: str, tensors: Sequence[Tensor], *, sized: bool = True) -> list[Tensor]:
        """Return the tensors of a collective's arguments, once all ranks are known to call the same."""
        if self._shared.check is not None:
            self._shared.check(self, operation, tensors, sized)
        return [buffers.checked(tensor) for tensor in tensors]

    def _collective(
        self,
        operation: str,
        requests: Sequence[MPI.Request],
        *,
        of: Sequence[Tensor],
        result: Sequence[Tensor],
        buffers: Sequence[Tensor],
        finish: Finish | None = None,
        opts: Any = None,
    ) -> Operation:
        """Begin a collective. `of` are the recorded tensors, `result` those it fills."""
        self._number += 1
        aside = getattr(opts, "asyncOp", True)
        return self._operation(
            operation, requests, self._number, of, result, buffers, finish, aside=aside
        )

    def _message(
        self,
        operation: str,
        request: MPI.Request,
        tensor: Tensor,
        buffer: Tensor,
        finish: Finish | None,
    ) -> Operation:
        """Begin a send or a receive."""
        return self._operation(
            operation, [request], 0, [tensor], [tensor], [buffer], finish, aside=True
        )

    def _operation(
        self,
        operation: str,
        requests: Sequence[MPI.Request],
        number: int,
        of: Sequence[Tensor],
        result: Sequence[Tensor],
        buffers: Sequence[Tensor],
        finish: Finish | None,
        *,
        aside: bool,
    ) -> Operation:
        self._begun += 1
        record = OperationRecord(
            index=self._begun,
            number=number,
            operation=operation,
            shapes=[tensor.shape for tensor in of],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in of],
        )
        self._records.append(record)
        return Operation(
            requests,
            record=record,
            mover=self._shared.mover,
            aside=aside,
            limit=self._limit,
            finish=finish,
            result=result,
            buffers=buffers,
        )
