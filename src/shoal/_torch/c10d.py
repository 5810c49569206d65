"""Names of torch.distributed that are private or differ between versions.

The default store, process groups, their records, RPC's agent, the all-gather of a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from shoal._torch.versions import required


def all_gather_tensor(output: Tensor, part: Tensor, **options: Any) -> Any:
    """Gather a part of one size from each rank; options are those of torch.

    Newer versions of torch rename it, and warn of the old name.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, **options)


def default_store() -> Any:
    """Return the store that formed the default process group. torch has no public access to it."""
    return required(distributed_c10d, "_get_default_store", "a world of several ranks")()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time limit of collectives of `group`, which torch lets one set only.

    None where torch lacks the name, or the group has no limit.
    """
    try:
        backend: Any = group._get_backend(group._device_types[0])
        limit: timedelta = backend.options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return limit


def host_stores_except(port: int) -> None:
    """Let rank 0 host the stores of this process's rendezvous, except the launcher's at `port`.

    Under a launcher that holds a store, torch takes every address for that store's, also one that a
    script sets itself, and waits for it. Without torch's function for that it still does.
    """
    module = sys.modules["torch.distributed.rendezvous"]
    theirs: Any = getattr(module, "_create_c10d_store", None)

    def create(host: str, at: int, rank: int, size: int, timeout: timedelta, *options: Any) -> Any:
        if at == port:
            return theirs(host, at, rank, size, timeout, *options)
        return TCPStore(host, at, size, rank == 0, timeout, multi_tenant=True)

    if theirs is not None:
        module._create_c10d_store = create  # type: ignore[attr-defined]


def process_groups() -> dict[dist.ProcessGroup, str]:
    """Return all process groups of this process with their names, including those of libraries.

    No public call lists them. Empty where torch lacks the table.
    """
    world = getattr(distributed_c10d, "_world", None)
    return dict(getattr(world, "pg_names", ()))


def end_process_groups(kept: Collection[dist.ProcessGroup], *, abort: bool) -> None:
    """End all process groups of this process but those in `kept`.

    With `abort`, it does not wait for collectives that they have begun. A backend that can't be aborted
    is left as it is. Where torch lacks the name, groups are destroyed, which may wait.
    """
    destroy = dist.destroy_process_group
    end = getattr(distributed_c10d, "_abort_process_group", destroy) if abort else destroy
    if not kept:
        end()
        return
    for group in reversed([each for each in process_groups() if each not in kept]):
        end(group)


def operator_group(arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of an operator, or None.

    Operators of `c10d` take a boxed group, those of `_c10d_functional` the name of one.
    """
    by_name = {name: group for group, name in process_groups().items()}
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(each)
            except (RuntimeError, TypeError):  # a reduction
                continue
        if isinstance(each, str) and each in by_name:
            return by_name[each]
    return None


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time limit of collectives that `group` begins from now on.

    torch takes a limit only when a group is made. Where it lacks the name its own limit stays.
    """
    change = getattr(dist, "set_timeout", None)  # public from torch 2.15 on
    if change is None:
        change = getattr(distributed_c10d, "_set_pg_timeout", None)
    if change is not None and dist.get_backend(group) != "fake":  # of `shoal plan`: it never waits
        change(timeout, group)


def operations_begun(group: Any) -> int:
    """Return the number of operations that `group` has begun.

    Gloo counts sends and receives, which the public flight recorder does not record. By torch's source,
    NCCL counts collectives only. 0 where torch lacks the name.
    """
    count = getattr(group, "_get_sequence_number_for_group", None)
    return 0 if count is None else int(count())


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of devices whose tensors `group` supports: "cpu", "cuda".

    `get_backend_config` does not know groups that Shoal implements. Empty where torch lacks the name.
    """
    return [device.type for device in getattr(group, "_device_types", ())]


def recorder_dumps() -> dict[str, Callable[..., bytes]]:
    """Return the functions that dump torch's flight recorders: for Gloo, and another for NCCL.

    torch documents the recorder, but no public way to read it. Those that it lacks are left out.
    """
    recorders = getattr(torch._C, "_distributed_c10d", None)
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return {name: getattr(recorders, name) for name in names if hasattr(recorders, name)}


def has_rpc_agent() -> bool:
    """Return whether this process has called `rpc.init_rpc`; torch allows one agent per process.

    False where torch lacks the name: `init_rpc` itself raises then if there is one.
    """
    from torch.distributed import rpc

    return bool(getattr(rpc, "_is_current_rpc_agent_set", bool)())


def provide_mpi(create: Callable[[Sequence[int]], dist.ProcessGroup]) -> None:
    """Let `init_process_group("mpi")` and sub-groups call `create` with their ranks; none are all.

    `register_backend` can't set it: torch reserves "mpi" for a class that only builds with MPI have.
    """
    module: Any = distributed_c10d
    module.ProcessGroupMPI = type("ProcessGroupMPI", (), {"create": staticmethod(create)})
    module._MPI_AVAILABLE = True
