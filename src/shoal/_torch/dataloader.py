"""Private names of torch's DataLoader."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any


def worker_processes(iterator: Any) -> list[BaseProcess]:
    """Return the worker processes of an iterator over a DataLoader; it has none without workers.

    torch names a worker that died by its process number, and often leaves out how it ended.
    """
    return list(getattr(iterator, "_workers", ()))
