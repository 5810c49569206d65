"""Private names of torch.distributed: the default store, all process groups, RPC's agent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> Any:
    """Return the store by which the default process group was formed; torch names no public way."""
    return distributed_c10d._get_default_store()


def process_groups() -> dict[dist.ProcessGroup, str]:
    """Return all process groups of this process with their names, those of libraries too."""
    return dict(distributed_c10d._world.pg_names)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of `group` in the order of their group ranks."""
    return list(distributed_c10d._world.pg_group_ranks[group])


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time limit of collectives that `group` begins from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def operations_begun(group: Any) -> int:
    """Return how many operations `group` has begun, sends and receives included."""
    return int(group._get_sequence_number_for_group())


def has_rpc_agent() -> bool:
    """Return whether this process has called `rpc.init_rpc`; torch allows one agent per process."""
    from torch.distributed import rpc

    return bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]
