"""The World of one rank whose other ranks do not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoal._torch.simulation import form_fake_group
from shoal.distributed.initialize import JoinedWorld
from shoal.distributed.layout import Layout
from shoal.distributed.placement import Placement
from shoal.distributed.seeds import DeterministicMode
from shoal.distributed.watchdog.diagnosis import WaitLimits
from shoal.distributed.world import World


class SimulatedWorld(World):
    """A World in which every rank has the values of this one."""

    simulated = True

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value for each rank."""
        return [value] * self.size

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return this rank's value."""
        return value

    def print(self, *parts: object, **options: Any) -> None:
        """Do nothing: numbers are not those of a training."""

    def barrier(self) -> None:
        """Do nothing: there is no other rank to wait for."""


def simulated_world(layout: Layout, rank: int, devices: int) -> SimulatedWorld:
    """Return the World of rank `rank` on nodes of `devices` devices, on the CPU of this process."""
    size = layout.size
    local = min(devices, size)
    nodes = -(-size // local)
    node = rank // local
    device = torch.device("cpu")
    joined = JoinedWorld(
        placement=Placement(
            rank=rank,
            size=size,
            local_rank=rank % local,
            local_size=min(local, size - node * local),
            node=node,
            nodes=nodes,
            cores=1,
            address="127.0.0.1",
            port=0,
            launcher="shoal plan",
            reason="simulated",
        ),
        layout=layout,
        device=device,
        devices=(device,),
        group=form_fake_group(rank, size) if size > 1 else None,
        store=HashStore(),
        choices=(),
        told="",
    )
    limits = WaitLimits(step=600.0, prepare=3600.0)
    mode = DeterministicMode(enabled=False)
    world = SimulatedWorld(joined, 0, limits, deterministic_mode=mode)
    if size > 1:
        world.mesh  # noqa: B018 - made now, while tensors have values
    return world
