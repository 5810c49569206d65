"""Pending operations of MPI as torch's work objects, and the thread that advances them.

MPI moves data only while it is called, so an operation has to be polled until it completes: by the
thread that waits for it, or else by a background thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.util.clock import CLOCK, PollBackoff

_ASIDE_SECONDS = 5e-5
"""Shortest sleep of the thread in seconds, so that it does not take the core of the computing thread.
"""


@dataclass(eq=False, kw_only=True)
class OperationRecord:
    """Facts about an operation that are kept for longer than its tensors.

    `index` counts all operations of a group, `number` its collectives. Times are in ns since 1970.
    """

    index: int
    number: int
    operation: str
    shapes: list[torch.Size]
    dtypes: list[str]
    thread: str = field(default_factory=lambda: str(threading.get_ident()))
    begun: int = field(default_factory=CLOCK.wall_ns)
    ended: int = 0
    done: bool = False
    awaited: bool = False
    """Whether a caller waits for it, or did."""

    @property
    def size(self) -> int:
        """The bytes of its recorded tensors."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(shape.numel() * getattr(torch, dtype).itemsize for shape, dtype in pairs)


class Operation(dist.Work):
    """Pending requests of MPI, with an action on completion or the error.

    `finish` is called once, with the statuses of the requests, on the thread that finds them complete.
    The operation fails after `limit` seconds. With `aside`, `mover` polls it from the beginning, since
    no caller waits for it at once.
    """

    def __init__(
        self,
        requests: Sequence[MPI.Request],
        *,
        record: OperationRecord,
        mover: ProgressThread,
        aside: bool,
        limit: float,
        finish: Callable[[Sequence[MPI.Status]], None] | None,
        result: Sequence[Tensor],
        buffers: Sequence[Any],
    ) -> None:
        super().__init__()
        self.record = record
        self._requests = list(requests)
        self._limit = limit
        self._deadline = CLOCK.now() + limit
        self._finish = finish
        self._result = list(result)
        self._buffers = buffers  # kept alive: MPI has only their addresses
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._error: BaseException | None = None
        self._statuses = [MPI.Status() for _ in requests]
        self._mover = mover
        self._aside = False
        if aside:
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._aside:
            self._aside = True
            self._mover.take(self)

    def poll(self) -> bool:
        """Return whether it is complete; one thread at a time asks MPI."""
        if self.record.done:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.record.done or not self._ask():
                return self.record.done
            future = self._future
        finally:
            self._lock.release()
        if future is not None:
            self._fulfil(future)
        return True

    def _ask(self) -> bool:
        try:
            if MPI.Request.Testall(self._requests, self._statuses):
                if self._finish is not None:
                    self._finish(self._statuses)
            elif CLOCK.now() < self._deadline:
                return False
            else:
                self._mover.given_up.append(self)
                raise dist.DistBackendError(
                    f"{self.record.operation} has waited {self._limit:g} s for other ranks"
                )
        except MPI.Exception as error:
            self._error = dist.DistBackendError(f"{self.record.operation} over MPI: {self._why(error)}")
        except Exception as error:
            self._error = error
        self.record.ended = CLOCK.wall_ns()
        self.record.done = True
        return True

    def _why(self, error: MPI.Exception) -> MPI.Exception:
        """Return the error of the statuses, if MPI reports that one of them has it."""
        if error.Get_error_class() != MPI.ERR_IN_STATUS:
            return error
        passed = (MPI.SUCCESS, MPI.ERR_PENDING)
        codes = [status.Get_error() for status in self._statuses]
        return next((MPI.Exception(code) for code in codes if code not in passed), error)

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is complete; raise its error. A `timeout` of 0 means no limit."""
        until = CLOCK.now() + timeout.total_seconds() if timeout > timedelta(0) else None
        patience = PollBackoff()
        self.record.awaited = True
        while not self.poll():
            if until is not None and CLOCK.now() > until:
                raise dist.DistBackendError(
                    f"{self.record.operation} is not complete after {timeout.total_seconds():g} s"
                )
            patience.pause()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the result as a future, which the background thread completes."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
            done = self.record.done
        if done:
            self._fulfil(self._future)
        else:
            self._hand_over()
        return self._future

    def is_completed(self) -> bool:
        """Return whether it is complete."""
        return self.poll()

    def is_success(self) -> bool:
        """Return whether it is complete and did not fail."""
        return self.poll() and self._error is None

    def exception(self) -> BaseException | None:
        """Return its error, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors that it filled."""
        return self._result

    def synchronize(self) -> None:
        """Wait for the operation, as `wait` does: a CPU has no streams to synchronize."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank of the group from which a message was received."""
        return self._statuses[0].source

    _source_rank = source_rank


class ProgressThread:
    """The thread that polls operations for which no caller waits. It ends with `stop`."""

    def __init__(self) -> None:
        self._new: deque[Operation] = deque()
        self.given_up: list[Operation] = []
        """Kept with their tensors, into which MPI may still write."""
        self._wake = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="shoal mpi", daemon=True)

    def take(self, operation: Operation) -> None:
        """Poll an operation until it is complete."""
        if not self._thread.is_alive():
            with suppress(RuntimeError):  # another thread has just started it
                self._thread.start()
        self._new.append(operation)
        self._wake.set()

    def stop(self) -> None:
        """End the thread. Operations that are not complete by now never will be."""
        self._ends = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        under_way: list[Operation] = []
        while not self._ends:
            if not under_way:
                self._wake.wait()
                patience = PollBackoff(_ASIDE_SECONDS)
            if self._wake.is_set():
                self._wake.clear()
                while self._new:
                    under_way.append(self._new.popleft())
                patience = PollBackoff(_ASIDE_SECONDS)
            under_way = [operation for operation in under_way if not operation.poll()]
            if under_way:
                patience.pause()
