"""Groups of ranks: those that run the same stage, and those with the stages of one replica."""

from __future__ import annotations

import torch.distributed as dist

from shoal.distributed.world import World
from shoal.strategies.partition.assignment import StageAssignment
from shoal.strategies.partition.members import StageRanks


def peers_of(world: World, crew: StageAssignment) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """Return the ranks that run this rank's stage, and their group if there are several. Collective."""
    lines = list(world.layout.groups("pipeline"))
    mine = world.layout.group(world.rank, "pipeline")
    found: tuple[tuple[int, ...], dist.ProcessGroup | None] = ((), None)
    for ranks in crew.ranks:
        places = [mine.index(rank) for rank in ranks]
        members = tuple(line[place] for line in lines for place in places)
        group = dist.new_group(list(members)) if len(members) > 1 else None
        if world.rank in members:
            found = members, group
    world.watchdog.extend_torch_timeouts()
    return found


def members_of(world: World, crew: StageAssignment) -> StageRanks:
    """Return the ranks of this replica, with the first one of each stage as its owner. Collective."""
    mine = world.layout.group(world.rank, "pipeline")
    owners = [mine.index(ranks[0]) for ranks in crew.ranks]
    group = world.mesh["pipeline"].get_group()
    return StageRanks(group, mine.index(world.rank), owners, world.device)
