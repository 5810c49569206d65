"""Worlds for tests: one without a process group, and real processes over Gloo."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.distributed import objects


@dataclass(frozen=True)
class NoLosses:
    """The membership of a world whose ranks may not be lost."""

    survivors: None = None


NO_LOSSES = NoLosses()


@dataclass(frozen=True)
class Alone:
    """A world of one; `size` can pretend to be another when only reading is tested."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    membership: Any = NO_LOSSES

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class OverGloo:
    rank: int
    size: int
    group: dist.ProcessGroup | None
    membership: Any = NO_LOSSES

    def gather(self, value: Any) -> list[Any]:
        return objects.gather(value, self.group) if self.group is not None else [value]

    def broadcast(self, value: Any) -> Any:
        return objects.broadcast(value, self.group) if self.group is not None else value


# What a child would otherwise import again each time. One list for all tests: there is one fork
# server, and it imports what it was told when the first process was started.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",  # DistributedDataParallel imports it when first used, in more than a second
    "torch.distributed.tensor",
    "shoal.checkpoint",
    "shoal.data",
    "shoal.training.step",
]

Task = Callable[..., Any]


def _child(world: tuple[int, int, Path], pipe: Connection, task: Task, *args: Any) -> None:
    rank, size, rendezvous = world
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        pipe.send((True, task(OverGloo(rank, size, dist.group.WORLD), *args)))
        dist.destroy_process_group()
    except Exception:
        pipe.send((False, traceback.format_exc()))


class Processes:
    """`size` processes that run `task(world, *args)`; none is left after the `with` block."""

    def __init__(self, size: int, task: Task, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._directory = tempfile.TemporaryDirectory()
        rendezvous = Path(self._directory.name) / "rendezvous"
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=((rank, size, rendezvous), theirs, task, *args), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(mine)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._directory.cleanup()

    def wait_for_exit(self, rank: int, timeout: float = 400) -> int:
        """The exit code of one of them."""
        self.processes[rank].join(timeout)
        code = self.processes[rank].exitcode
        assert code is not None, f"rank {rank} is still running after {timeout} s"
        return code

    def results(self, timeout: float = 400) -> list[Any]:
        """What the task returned on each rank; fails with a rank's traceback."""
        deadline = time.monotonic() + timeout
        values = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} is silent"
            good, value = pipe.recv()
            assert good, f"rank {rank} failed:\n{value}"
            values.append(value)
        return values


def run(size: int, task: Task, *args: Any) -> list[Any]:
    """Run `task(world, *args)` on `size` ranks; what it returned on each."""
    with Processes(size, task, *args) as processes:
        return processes.results()
