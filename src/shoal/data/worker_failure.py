"""Dead Loader workers: turn the errors that torch raises into a DataError with the cause and a fix."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import queues
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, NamedTuple

from shoal._torch.dataloader import ExceptionWrapper
from shoal.distributed.passing_faults import note_cause, passing_cause
from shoal.util.errors import DataError

_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(.*)", re.DOTALL)
_SIGNAL = re.compile(r"is killed by signal: ([^.]+)\.")
_CODE = re.compile(r"exit code (\d+)")
_UNSENT = 74
"""The exit code of a worker that can't send an item (EX_IOERR)."""
_FIX: dict[int | None, str] = {
    signal.SIGKILL: "use fewer workers, num_workers={fewer}: the system may have run out of memory "
    "(dmesg names the process)",
    signal.SIGBUS: "use fewer workers, num_workers={fewer}: shared memory may be full (df -h /dev/shm)",
    _UNSENT: "let the dataset and collate_fn return objects that pickle.dumps accepts, or use "
    "num_workers=0",
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
            ForkingPickler.dumps(self.exc_type)
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


class TimedItem(NamedTuple):
    """An item and the seconds that it took in the process that loaded it."""

    item: Any
    seconds: float


def end_if_unsent() -> None:
    """End this worker if it can't pickle an item, once Python has printed why.

    The thread that sends items would skip it, and the rank would wait for it forever.
    """
    former = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]

    def end(error: Exception, sent: Any) -> None:
        former(error, sent)
        # Other queues belong to the user.
        if isinstance(sent, tuple) and isinstance(sent[-1], TimedItem):
            sys.stderr.flush()
            os._exit(_UNSENT)

    setattr(queues.Queue, "_on_queue_feeder_error", staticmethod(end))  # noqa: B010


class _Handler:
    """A handler of SIGCHLD that explains the errors that the `former` one raises."""

    def __init__(self, former: Callable[[int, FrameType | None], Any], workers: LoaderWorkers) -> None:
        self.former = former
        self._workers = workers

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        with self._workers.explained():
            self.former(signum, frame)


def _how(text: str, code: int | None) -> tuple[str, int | None]:
    """Return how a worker ended, from torch's message or else from its exit `code`, and the key of the
    fix.
    """
    killed = _SIGNAL.search(text)
    if killed is not None:
        found = [each for each in signal.Signals if signal.strsignal(each) == killed[1]]
        return (f"signal {found[0].value}, {killed[1]}", found[0]) if found else (killed[1], None)
    if code is not None and code < 0:
        return f"signal {-code}, {signal.strsignal(-code)}", signal.Signals(-code)
    said = _CODE.search(text)
    code = code if said is None else int(said[1])
    if code == _UNSENT:
        return "it can't send a batch; the reason is printed above", code
    return f"exit code {code}" if code else "it ended by itself", None
