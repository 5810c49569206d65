"""Dead Loader workers: turn the errors that torch raises into a DataError with the cause and a fix."""

from __future__ import annotations

import io
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

from shoal._torch.dataloader import ExceptionWrapper
from shoal.distributed.passing_faults import note_cause, passing_cause
from shoal.util.errors import DataError

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(.*)", re.DOTALL)
_SIGNAL = re.compile(r"is killed by signal: ([^.]+)\.")
_CODE = re.compile(r"exit code (\d+)")
_FIX: dict[signal.Signals | None, str] = {
    signal.SIGKILL: "use fewer workers, num_workers={fewer}: the system may have run out of memory "
    "(dmesg names the process)",
    signal.SIGBUS: "use fewer workers, num_workers={fewer}: shared memory may be full (df -h /dev/shm)",
}
_ELSE = "use num_workers=0: the rank itself then reads the dataset, and its error shows the line"
_LOST = (EOFError, ConnectionError, FileNotFoundError)
"""Raised if a worker dies while it sends a batch through shared memory. Errors of the dataset start
with "Caught".
"""
_PINNING = "Pin memory thread exited unexpectedly"
"""torch's error where the thread that pins batches met one of _LOST."""
_ENDING_SECONDS = 5.0
"""Seconds in which a process that has closed its sockets ends."""


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers:
    """The `count` workers of a rank's Loader, and their processes once they have started."""

    rank: int
    count: int
    processes: list[BaseProcess] = field(default_factory=list)

    def explain(self, error: BaseException) -> DataError | None:
        """Return the error to raise in place of torch's if that reports a dead worker, else None."""
        if isinstance(error.__cause__, DataError):
            return error.__cause__
        lost = isinstance(error, _LOST) and not str(error).startswith("Caught ")
        if self.processes and (lost or str(error) == _PINNING):
            # The worker died after it announced a batch, before it sent the memory.
            wait([each.sentinel for each in self.processes], _ENDING_SECONDS)
            died = [each for each in self.processes if each.exitcode is not None]
            return self._died(str(died[0].pid), "", died[0].exitcode) if died else None
        match = _DIED.match(str(error))
        if match is None or not isinstance(error, RuntimeError):
            return None
        number = int(match[1].partition(",")[0])
        codes = (each.exitcode for each in self.processes if each.pid == number)
        return self._died(match[1], match[2], next(codes, None))

    def _died(self, process: str, text: str, code: int | None) -> DataError:
        how, ended_by = _how(text, code)
        error = DataError(
            given=f"shoal.Loader(…, num_workers={self.count})",
            found=f"a worker of rank {self.rank}'s Loader died ({how}): process {process}",
            fix=_FIX.get(ended_by, _ELSE).format(fewer=self.count // 2),
        )
        return note_cause(error, "")  # the rank lost a connection only because of that

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise DataError in place of an error by which torch reports a dead worker."""
        try:
            yield
        except (RuntimeError, *_LOST) as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from None

    def watch(self) -> None:
        """Do the same for errors that torch raises in the main thread outside the Loader.

        torch raises them in a handler of SIGCHLD, which it sets when the first workers start.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        now = signal.getsignal(signal.SIGCHLD)
        former = now.former if isinstance(now, _Handler) else now
        if callable(former):
            signal.signal(signal.SIGCHLD, _Handler(former, self))


class WorkerError(ExceptionWrapper):
    """The error of a worker, sent in place of an item, with the fault that caused it and may pass.

    The rank raises an error of the same type, with the text. Like torch for a class that can't be
    created from a text, it takes a RuntimeError for one that can't be pickled, such as a local class.
    """

    def __init__(self, error: Exception) -> None:
        where = "in a DataLoader worker process"
        super().__init__((type(error), error, error.__traceback__), where=where)
        self._cause = passing_cause(error)
        try:
            pickle.dumps(self.exc_type)
        except Exception:  # also of a metaclass
            self.exc_type = RuntimeError

    def reraise(self) -> None:
        """Raise the error of the worker, with its cause."""
        try:
            super().reraise()
        except (self.exc_type, RuntimeError) as error:
            note_cause(error, self._cause)
            raise
        except Exception:  # torch passes message= to a class with this attribute
            self.exc_type = RuntimeError
        self.reraise()


class Parcel:
    """What a worker sends: a value, or an error if it can't be pickled.

    It pickles the value itself. The thread that sends it would only print an error, and the rank would
    wait forever.
    """

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        try:
            return pickle.loads, (_pickled(self._value),)
        except Exception as error:
            unsent = DataError(
                given="shoal.Loader(…, num_workers=…)",
                found=f"a worker can't send a batch to its rank: {type(error).__name__}: {error}",
                fix="let the dataset and collate_fn return objects that pickle.dumps accepts, "
                "or use num_workers=0",
            )
            return pickle.loads, (_pickled(WorkerError(unsent)),)


def _pickled(value: object) -> bytes:
    # As a queue does: tensors stay in shared memory.
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


class _Handler:
    """A handler of SIGCHLD that explains the errors that the `former` one raises."""

    def __init__(self, former: Callable[[int, FrameType | None], Any], workers: LoaderWorkers) -> None:
        self.former = former
        self._workers = workers

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        with self._workers.explained():
            self.former(signum, frame)


def _how(text: str, code: int | None) -> tuple[str, signal.Signals | None]:
    """Return how a worker ended, from torch's message or else from its exit `code`."""
    killed = _SIGNAL.search(text)
    if killed is not None:
        found = [each for each in signal.Signals if signal.strsignal(each) == killed[1]]
        return (f"signal {found[0].value}, {killed[1]}", found[0]) if found else (killed[1], None)
    if code is not None and code < 0:
        return f"signal {-code}, {signal.strsignal(-code)}", signal.Signals(-code)
    said = _CODE.search(text)
    code = code if said is None else int(said[1])
    return f"exit code {code}" if code else "it ended by itself", None
