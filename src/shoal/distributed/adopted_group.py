"""A default process group that exists before `shoal.init`: of Ray Train, Accelerate or a script.

The World forms a group of its own over the same ranks, through the store of the existing one. So
backends, time limits and the end are those of the World, and the existing group outlives it. Only a
mesh axis over all ranks uses the existing group itself, since torch takes it for those.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shoal._torch import c10d
from shoal.distributed import env_vars
from shoal.distributed.cluster_env import Placement
from shoal.util.decision import Decision
from shoal.util.errors import LaunchError

_FORMED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups that worlds of this process have formed, by which an open World is recognized."""


@dataclass(frozen=True, kw_only=True)
class AdoptedGroup:
    """The default process group of this process, with several ranks.

    `assigned` is the device that was chosen for this rank, and by what. `kept` has all groups of this
    process with their time limits, which are set again at the end. `store` is the World's part of the
    group's store.
    """

    rank: int
    size: int
    config: str
    assigned: tuple[torch.device, str] | None
    kept: Mapping[dist.ProcessGroup, timedelta | None]
    store: Store

    @property
    def limit(self) -> str:
        """The later time limit of the default group, in words."""
        own = next((limit for each, limit in self.kept.items() if each is dist.group.WORLD), None)
        known = "" if own is None else f" of {own.total_seconds():g} s"
        return f"the process group that exists gets its own limit{known} back at close()"

    def choose_backend(self, backend: str | None, device: torch.device) -> Decision[str]:
        """Return the group's backend for `device`. Raises LaunchError if that is not `backend`."""
        own = dict(part.split(":") for part in self.config.split(",")).get(device.type)
        if own is None or backend not in (None, own):
            given = f"device={str(device)!r}" if own is None else f"backend={backend!r}"
            raise LaunchError(
                given=f"shoal.init() with {given}",
                found=f"torch.distributed has a default process group already, with {self.config}",
                fix="leave device and backend out, or choose them where the group is made: "
                "init_process_group(…), in Ray Train TorchConfig(backend=…)",
            )
        return Decision(
            what="backend", value=own, reason=f"the process group that exists has {self.config}"
        )


def find_group() -> AdoptedGroup | None:
    """Return the default process group of this process if it has several ranks, or None.

    Raises LaunchError if it is that of a World.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    groups, config = c10d.process_groups(), str(dist.get_backend_config(group))
    if any(each in _FORMED for each in groups):
        raise LaunchError(
            given=f"shoal.init() on rank {rank} of {size}",
            found="an earlier World of this process is still open",
            fix="close it before: `with shoal.init() as world:`, or world.close()",
        )
    store, number = c10d.default_store(), 0
    if "fake" not in config:
        with suppress(RuntimeError):  # MPI's groups have no store
            # Processes of a pool may have had different numbers of worlds before: the store counts.
            number = store.add(f"shoal/worlds/{rank}", 1)
    if not number:
        raise LaunchError(
            given=f"shoal.init() on rank {rank} of {size} of a process group with {config}",
            found="that group has no store through which its ranks can exchange addresses",
            fix=f"leave init_process_group out: shoal run -n {size} script.py, or under mpirun "
            "shoal.init(backend='mpi')",
        )
    return AdoptedGroup(
        rank=rank,
        size=size,
        config=config,
        assigned=_assigned(getattr(group, "bound_device_id", None)),
        kept={each: c10d.timeout_of(each) for each in groups},
        store=PrefixStore(f"shoal/world/{number}", store),
    )


def _assigned(bound: torch.device | None) -> tuple[torch.device, str] | None:
    if bound is not None:
        return bound, "init_process_group(device_id=…)"
    name = env_vars.variable(env_vars.ASSIGNED_DEVICE)
    return (torch.device(name), f"{env_vars.ASSIGNED_DEVICE}={name}") if name else None


def check_group_of_one(placement: Placement) -> None:
    """Raise LaunchError if the launcher started several ranks, and each has a group of its own."""
    if placement.size > 1 and dist.is_initialized():
        raise LaunchError(
            given=f"shoal.init() on rank {placement.rank} of {placement.size} ({placement.launcher})",
            found="torch.distributed has a default process group of one rank: each would train alone",
            fix=f"pass world_size={placement.size} to init_process_group, or leave it out",
        )


def note_formed(group: Any) -> dist.ProcessGroup:
    """Return a group that a World has formed."""
    _FORMED.add(group)
    formed: dist.ProcessGroup = group
    return formed
