"""The backend that torch makes its process groups of."""

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
"""Its name among torch's, which keeps "mpi" to itself."""
_TAGS = 32767
"""Tags are smaller in every MPI, by the standard."""


def serve(placement: Placement) -> tuple[str, str]:
    """Begin MPI and register a backend for a world of it: its name, and what it stands on.

    Raises LaunchError where MPI's world is not that of the launcher.
    """
    mpi = library.begin(placement)
    from shoal.distributed.mpi.base_group import Shared
    from shoal.distributed.mpi.process_group import (
        Group,  # imports mpi4py.MPI, which has to be the launcher's
    )

    shared = Shared()

    def make(options: Any, _: Any) -> Group:
        """A group of the ranks that call this, which are those that it shall have."""
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
    """Until all are here, or the time is over: to make a communicator MPI would wait without end."""
    if store.add("members", 1) == size:
        store.set("complete", "")
    store.wait(["complete"], timeout)
