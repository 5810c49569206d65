"""The backend from which torch makes its process groups."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shoal.distributed.cluster_env import Placement
from shoal.distributed.mpi import library

if TYPE_CHECKING:
    from shoal.distributed.mpi.process_group import Group

BACKEND = "shoal_mpi"
"""Name of the backend in torch, which reserves "mpi"."""
_TAGS = 32767
"""Largest tag that every MPI supports, by the standard."""


def serve(placement: Placement) -> tuple[str, str]:
    """Initialize MPI and register a backend for a world of it; return its name and its description.

    Raises LaunchError if MPI's world is not that of the launcher.
    """
    mpi = library.begin(placement)
    from shoal.distributed.mpi.base_group import SharedState
    from shoal.distributed.mpi.process_group import (
        Group,  # imports mpi4py.MPI, which must be the launcher's
    )

    shared = SharedState()

    def make(options: Any, _: Any) -> Group:
        """Return a group of the ranks that call this, which are all of its members."""
        world = mpi.COMM_WORLD.group
        ranks = list(options.global_ranks_in_group) or list(range(world.size))
        _await_members(options.store, len(ranks), options.timeout)
        tag = zlib.crc32(str(options.group_id).encode()) % _TAGS
        collectives = mpi.COMM_WORLD.Create_group(world.Incl(ranks), tag)
        limit = options.timeout.total_seconds()
        return Group(shared, collectives, collectives.Dup(), limit=limit)

    dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND, library.describe(mpi)


def _await_members(store: Any, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are present or the time is over; MPI itself would wait forever for them."""
    if store.add("members", 1) == size:
        store.set("complete", "")
    store.wait(["complete"], timeout)
