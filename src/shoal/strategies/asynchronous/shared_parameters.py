"""Parameters that many workers change at any time: in memory that they share, or in one of them.

Whoever adds takes no lock (Recht et al. 2011): two that add to one number at the same moment may lose
one of the two. Whoever reads may see a change half done.
"""

from __future__ import annotations

import mmap
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal._torch import foreach
from shoal.distributed.world import World

_ALIGNED = 64
"""Bytes of a line of the cache: workers that count beside each other don't take each other's."""
_UPDATES, _CLOCK = 0, 1
_COUNTERS = _ALIGNED // 8
_TOKEN = 16


class Commons(ABC):
    """Where the parameters are that all workers share; workers go by the first number of their rank."""

    @abstractmethod
    def put(self, values: Sequence[Tensor]) -> None:
        """Let the parameters have these values, as long as nobody changes them."""

    @abstractmethod
    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Copy the parameters; how many updates of each worker they had when that began."""

    @abstractmethod
    def add(self, changes: Sequence[Tensor]) -> list[int]:
        """Add an update of this worker's; how many updates of each there were when that began."""

    @abstractmethod
    def tick(self) -> None:
        """This worker has taken a step, whether it changed anything or not."""

    @abstractmethod
    def clocks(self) -> list[int]:
        """How many steps each worker has taken."""


class SharedMemory(Commons):
    """Parameters in memory of this machine, for one `worker` of several.

    Each worker counts in a place of its own, so that counting needs no lock either.
    """

    def __init__(self, memory: Tensor, like: Sequence[Tensor], worker: int, workers: int) -> None:
        self._worker = worker
        begin = _ALIGNED  # after the token
        counters = memory[begin : begin + workers * _ALIGNED].numpy()
        self._counters = counters.view(np.int64).reshape(workers, _COUNTERS)
        self._values = []
        begin += workers * _ALIGNED
        for tensor in like:
            bytes_of = memory[begin : begin + tensor.nbytes]
            self._values.append(bytes_of.view(tensor.dtype).view(tensor.shape))
            begin += _aligned(tensor.nbytes)

    def put(self, values: Sequence[Tensor]) -> None:
        """Copy them there."""
        foreach.copy_(self._values, list(values))

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Copy them from there."""
        before = self.updates()
        foreach.copy_(list(into), self._values)
        return before

    def add(self, changes: Sequence[Tensor]) -> list[int]:
        """Add in place; see the class."""
        return self.add_for(self._worker, changes)

    def tick(self) -> None:
        """Count one more."""
        self.tick_for(self._worker)

    def clocks(self) -> list[int]:
        """As they stand."""
        return [int(clock) for clock in self._counters[:, _CLOCK]]

    def updates(self) -> list[int]:
        """How many updates of each worker there have been."""
        return [int(count) for count in self._counters[:, _UPDATES]]

    def snapshot(self) -> tuple[list[int], list[Tensor]]:
        """Return the parameters, which others may be changing, and their updates when that began."""
        return self.updates(), self._values

    def add_for(self, worker: int, changes: Sequence[Tensor]) -> list[int]:
        """Add an update of a worker's."""
        before = self.updates()
        foreach.add_(self._values, list(changes))
        self._counters[worker, _UPDATES] += 1
        return before

    def tick_for(self, worker: int) -> None:
        """Count a step of a worker's."""
        self._counters[worker, _CLOCK] += 1


def private(like: Sequence[Tensor], world: World) -> SharedMemory:
    """In memory of this process alone, of which it gives others what they ask for."""
    memory = torch.zeros(_size(like, world.size), dtype=torch.uint8)
    return SharedMemory(memory, like, world.rank, world.size)


def shared(like: Sequence[Tensor], world: World) -> SharedMemory | str:
    """In memory that all ranks have mapped; or why they can't. Collective.

    Nothing of it has a name, so that nothing is left behind whoever is killed when: rank 0 makes a
    file in memory, and the others open what it has open.
    """
    size = _size(like, world.size)
    descriptor, path = -1, ""
    token = bytes.fromhex(world.broadcast(secrets.token_hex(_TOKEN)))
    try:
        if world.is_rank_zero:
            descriptor = os.memfd_create("shoal")
            os.truncate(descriptor, size)
            os.pwrite(descriptor, token, 0)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        path = world.broadcast(path)
        found: mmap.mmap | str
        try:
            if not world.is_rank_zero:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            found = mmap.mmap(descriptor, size)
            if found[:_TOKEN] != token:  # a process of this number on another machine
                found = "it has another file there"
        except (OSError, ValueError) as error:
            found = str(error)
        failures = world.gather(found if isinstance(found, str) else None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    for rank, failure in enumerate(failures):
        if failure is not None:
            return f"rank {rank} can't map the memory of rank 0 ({failure})"
    return SharedMemory(torch.frombuffer(found, dtype=torch.uint8), like, world.rank, world.size)


def _size(like: Sequence[Tensor], workers: int) -> int:
    return _ALIGNED * (1 + workers) + sum(_aligned(tensor.nbytes) for tensor in like)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
