"""Private names of torch's DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch._utils
from torch.utils.data import _utils, dataloader

ExceptionWrapper = torch._utils.ExceptionWrapper
"""The error that a worker sends in place of an item: the DataLoader calls `reraise` on it."""


def worker_processes(iterator: Any) -> list[BaseProcess]:
    """Return the worker processes of an iterator over a DataLoader; an empty list without workers.

    torch names a worker that died by its process number, and often leaves out how it ended.
    """
    return list(getattr(iterator, "_workers", ()))


def end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator over a DataLoader.

    torch does so once nothing refers to it. Until then, its handler of SIGCHLD raises an error
    for a dead worker wherever the main thread is.
    """
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def leave_worker() -> None:
    """Make `torch.utils.data.get_worker_info` return None in this worker process.

    Otherwise datasets would split their samples, or reseed, by the number of the worker. They still do
    with a torch that stores it elsewhere.
    """
    worker: Any = getattr(_utils, "worker", None)
    if worker is not None:
        worker._worker_info = None


def observe_batches(
    started: Callable[[Any, Any], None],
    delivered: Callable[[Any, Any], None],
    ended: Callable[[Any], None],
) -> None:
    """Report the batches of all DataLoaders of this process, for the rest of the process.

    `started(iterator, loader)` is called when a pass begins, `delivered(iterator, indices)` with the
    sampler's indices of a batch when the loop receives it, `ended(iterator)` at the end of the pass.
    Batches arrive in the order of the sampler, also from workers.
    """
    base = dataloader._BaseDataLoaderIter
    create, next_index, next_batch, reset = (
        base.__init__,
        base._next_index,
        base.__next__,
        base._reset,
    )
    fresh: WeakSet[Any] = WeakSet()
    waiting: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()

    def index(self: Any) -> Any:
        found = next_index(self)
        waiting.setdefault(self, deque()).append(found)
        return found

    def build(self: Any, loader: Any) -> None:
        create(self, loader)
        fresh.add(self)  # with workers, the first reset follows
        started(self, loader)

    def begin(self: Any, loader: Any, first_iter: bool = False) -> None:
        waiting[self] = deque()
        if self not in fresh:
            started(self, loader)
        fresh.discard(self)
        reset(self, loader, first_iter)

    def batch(self: Any) -> Any:
        try:
            found = next_batch(self)
        except StopIteration:
            ended(self)
            raise
        if waiting.get(self):
            delivered(self, waiting[self].popleft())
        return found

    replaced = {"__init__": build, "_next_index": index, "__next__": batch, "_reset": begin}
    for name, method in replaced.items():
        setattr(base, name, method)
