"""The settings of each rank of a launch, and differences where ranks should be the same."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from shoal.distributed.world import World
from shoal.tools.doctor.findings import RankFacts, describe_difference
from shoal.tools.doctor.info.machine import gpu, versions
from shoal.util.differences import differences, spans

MOST_ROWS = 32
"""Up to this number, each rank has a row; with more, each machine has one."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank's information about itself."""

    local_rank: int
    cores: int
    threads: int
    device: str
    versions: Mapping[str, str]


def gather(world: World) -> list[RankFacts[RankInfo]]:
    """Return all ranks, in their order, on every rank."""
    device = str(world.device)
    if world.device.type == "cuda":
        device += f" ({gpu(world.device.index)})"
    mine = RankInfo(
        local_rank=world.placement.local_rank,
        cores=world.placement.cores,
        threads=torch.get_num_threads(),
        device=device,
        versions=versions(),
    )
    own = RankFacts(rank=world.rank, host=socket.gethostname(), facts=mine)
    return list(world.gather(own))


def rows(ranks: Sequence[RankFacts[RankInfo]]) -> list[tuple[str, str, str, str, str, str]]:
    """Return rank, host, local rank, cores, threads and device, by rank or, for many, by machine."""
    if len(ranks) <= MOST_ROWS:
        groups = [[one] for one in ranks]
    else:
        by_host = sorted(ranks, key=lambda one: one.host)
        groups = [list(group) for _, group in groupby(by_host, lambda one: one.host)]
        groups.sort(key=lambda group: group[0].rank)
    return [
        (
            spans([one.rank for one in group]),
            group[0].host,
            spans([one.facts.local_rank for one in group]),
            _each([str(one.facts.cores) for one in group]),
            _each([str(one.facts.threads) for one in group]),
            _each([one.facts.device for one in group]),
        )
        for group in groups
    ]


def _each(values: Sequence[str]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return values[0] if len(values) == 1 else f"{values[0]} each"
    return ", ".join(f"{value} x{times}" if times > 1 else value for value, times in counts.items())


def version_differences(ranks: Sequence[RankFacts[RankInfo]]) -> Iterator[str]:
    """Yield a line for each version that is not the same on all ranks, with the ranks that differ."""
    for found in differences([one.facts.versions for one in ranks]):
        yield f"{found.name} differs: {describe_difference(found, ranks)}"
