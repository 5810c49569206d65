"""Parameters that several workers update at any time, in shared memory or in one process.

Updates take no lock (Recht et al. 2011): if two workers add to one number at the same time, one of the
two changes may be lost. A reader may see a partial update.
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
"""Bytes of a cache line. Counters of different workers are on different lines (no false sharing)."""
_UPDATES, _CLOCK = 0, 1
_COUNTERS = _ALIGNED // 8
_TOKEN = 16


class ParameterStorage(ABC):
    """Storage of the parameters of all workers. A `worker` is its rank at the start."""

    @abstractmethod
    def put(self, values: Sequence[Tensor]) -> None:
        """Set the parameters to these values. No worker may change them at the same time."""

    @abstractmethod
    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Copy the parameters; return the number of updates of each worker before the copy."""

    @abstractmethod
    def add(self, worker: int, changes: Sequence[Tensor]) -> list[int]:
        """Add an update of a worker; return the number of updates of each worker before it."""

    @abstractmethod
    def tick(self, worker: int) -> None:
        """Count a step of a worker, with or without an update."""

    @abstractmethod
    def clocks(self) -> list[int]:
        """Return the number of steps that each worker has taken."""


class SharedMemory(ParameterStorage):
    """Parameters in the memory of this machine.

    Each worker has separate counters, so that counting needs no lock either.
    """

    def __init__(self, memory: Tensor, like: Sequence[Tensor], workers: int) -> None:
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
        """Copy the values into the memory; see the contract."""
        foreach.copy_(self._values, list(values))

    def read(self, into: Sequence[Tensor]) -> list[int]:
        """Copy the parameters from the memory; see the contract."""
        before = self.updates()
        foreach.copy_(list(into), self._values)
        return before

    def clocks(self) -> list[int]:
        """Return the current numbers of steps; see the contract."""
        return [int(clock) for clock in self._counters[:, _CLOCK]]

    def updates(self) -> list[int]:
        """Return the number of updates of each worker so far."""
        return [int(count) for count in self._counters[:, _UPDATES]]

    def snapshot(self) -> tuple[list[int], list[Tensor]]:
        """Return the numbers of updates, and the parameters, which others may be changing."""
        return self.updates(), self._values

    def add(self, worker: int, changes: Sequence[Tensor]) -> list[int]:
        """Add an update of a worker, whose model may be on another device."""
        before = self.updates()
        foreach.add_(self._values, [change.cpu() for change in changes])
        self._counters[worker, _UPDATES] += 1
        return before

    def tick(self, worker: int) -> None:
        """Count a step; see the contract."""
        self._counters[worker, _CLOCK] += 1


def private(like: Sequence[Tensor], world: World) -> SharedMemory:
    """Return parameters in the memory of this process, which serves them to others on request."""
    memory = torch.zeros(_size(like, world.size), dtype=torch.uint8)
    return SharedMemory(memory, like, world.size)


def shared(like: Sequence[Tensor], world: World) -> SharedMemory | str:
    """Return parameters in memory that all ranks have mapped, or the reason why they can't. Collective.

    The memory is anonymous, so no file remains if processes are killed: rank 0 creates an in-memory
    file, and the others open it through rank 0's file descriptor.
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
                found = "the descriptor belongs to another file"
        except (OSError, ValueError) as error:
            found = str(error)
        failures = world.gather(found if isinstance(found, str) else None)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    for rank, failure in enumerate(failures):
        if failure is not None:
            return f"rank {rank} cannot map the memory of rank 0 ({failure})"
    return SharedMemory(torch.frombuffer(found, dtype=torch.uint8), like, world.size)


def _size(like: Sequence[Tensor], workers: int) -> int:
    return _ALIGNED * (1 + workers) + sum(_aligned(tensor.nbytes) for tensor in like)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
