"""What the measured links between ranks say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.doctor.findings import Finding, Seen, failure, ok, warning
from shoal.links import Matrix, Pairs, pairs, slow

if TYPE_CHECKING:
    from shoal.world import World

MOST_RANKS = 64
"""Of more ranks only the first of each host is measured: pairs grow as their square."""

WARNED, FAILED = 2.0, 3.0
"""So many times slower than usual. Less is noise where ranks outnumber cores."""


def chosen(hosts: Sequence[str]) -> list[int]:
    """The ranks that are measured."""
    if len(hosts) <= MOST_RANKS:
        return list(range(len(hosts)))
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    return firsts if len(firsts) > 1 else list(range(MOST_RANKS))


def look(world: World, hosts: Sequence[str]) -> dict[str, Any] | None:
    """The links of a world whose ranks are on these hosts; rank 0 has them. Collective."""
    measured = pairs(world, among=chosen(hosts))
    return asdict(measured) if world.first else None


def judge(ranks: Sequence[Seen[dict[str, Any]]]) -> Iterator[Finding]:
    """A line for each slow machine, rank or link; one for all where none is."""
    measured = Pairs(**ranks[0].facts)
    found = slow(measured, factor=WARNED)
    for one in found:
        hosts = " and ".join(one.hosts)
        text = f"{one.what} ({hosts}): {one.bandwidth / 1e9:.3g} GB/s, "
        text += f"others {one.ratio:.1f} times as much"
        fix = f"see to cables and ports of {hosts} (ethtool -S, ibstat, nvidia-smi nvlink -s), "
        fix += f"or leave one out (sbatch --exclude={one.hosts[0]})"
        yield (failure if one.ratio >= FAILED else warning)("links", text, fix)
    if not found:
        for within, what in ((False, "between hosts"), (True, "within a host")):
            speeds = list(_values(measured, measured.bandwidth, within=within))
            delays = list(_values(measured, measured.latency, within=within))
            if speeds:
                text = f"{what} {min(speeds) / 1e9:.3g} to {max(speeds) / 1e9:.3g} GB/s "
                text += f"from rank to rank, {1e6 * statistics.median(delays):.0f} µs"
                yield ok("links", text)


def _values(measured: Pairs, matrix: Matrix, *, within: bool) -> Iterator[float]:
    for a, row in enumerate(matrix):
        for b, value in enumerate(row):
            if value is not None and (measured.hosts[a] == measured.hosts[b]) == within:
                yield value
