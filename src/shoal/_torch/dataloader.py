"""Private names of torch's DataLoader."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import _utils


def worker_processes(iterator: Any) -> list[BaseProcess]:
    """Return the worker processes of an iterator over a DataLoader; an empty list without workers.

    torch names a worker that died by its process number, and often leaves out how it ended.
    """
    return list(getattr(iterator, "_workers", ()))


def leave_worker() -> None:
    """Make `torch.utils.data.get_worker_info` return None in this worker process.

    Otherwise datasets would split their samples, or reseed, by the number of the worker. They still do
    with a torch that stores it elsewhere.
    """
    worker: Any = getattr(_utils, "worker", None)
    if worker is not None:
        worker._worker_info = None
