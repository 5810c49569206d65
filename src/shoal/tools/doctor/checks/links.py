"""Check the measured links between ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.distributed.link_speed import LinkMeasurements, Matrix, pairs, slow
from shoal.tools.doctor.findings import CheckResult, RankFacts, failure, ok, warning

if TYPE_CHECKING:
    from shoal.distributed.world import World

MOST_RANKS = 64
"""With more ranks only the first of each host is measured, since pairs grow as their square."""

BYTES, REPEATS = 1 << 20, 5
"""Message size: enough to detect low bandwidth, and short even at 10 Mbit/s."""

WARNED, FAILED = 2.0, 3.0
"""Ratio to the usual time from which a link is slow. Less is noise if ranks outnumber cores."""


def choose_ranks(hosts: Sequence[str], crowded: Sequence[str]) -> list[int]:
    """Return the ranks to measure: on hosts where ranks take turns on cores, only the first."""
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    alone = firsts if len(hosts) > MOST_RANKS and len(firsts) > 1 else []
    ranks = [rank for rank, host in enumerate(hosts) if host not in crowded or rank in firsts]
    return alone or ranks[:MOST_RANKS]


def measure_links(world: World, among: Sequence[int]) -> dict[str, Any] | None:
    """Return the links between these ranks of a world on rank 0, if there are any. Collective."""
    if len(among) < 2:
        return None
    measured = pairs(world, bytes=BYTES, repeats=REPEATS, among=among)
    return asdict(measured) if world.is_rank_zero else None


def best_links(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the best measurement of each link."""
    if one is None or other is None:
        return None
    return {
        **one,
        "bandwidth": _each(max, one["bandwidth"], other["bandwidth"]),
        "latency": _each(min, one["latency"], other["latency"]),
    }


def _each(best: Callable[[float, float], float], one: Matrix, other: Matrix) -> Matrix:
    return tuple(
        tuple(None if a is None or b is None else best(a, b) for a, b in zip(*rows, strict=True))
        for rows in zip(one, other, strict=True)
    )


def check_links(ranks: Sequence[RankFacts[dict[str, Any] | None]]) -> Iterator[CheckResult]:
    """Yield a line for each slow machine, rank or link; one line for all if none is slow."""
    if ranks[0].rank:  # only rank 0 has them; its own trouble is reported
        return
    facts = ranks[0].facts
    if facts is None:
        yield ok("links", "not measured: ranks take turns on too few cores")
        return
    measured = LinkMeasurements(**facts)
    # Links that are certainly slow are kept apart from those that may be.
    certain = slow(measured, factor=FAILED)
    found = certain or slow(measured, factor=WARNED)
    for one in found:
        hosts = " and ".join(one.hosts)
        text = f"{one.what} ({hosts}): {one.bandwidth / 1e9:.3g} GB/s, "
        text += f"others {one.ratio:.1f} times as much"
        within = len(one.hosts) == 1 and len(one.ranks) == 2
        look = "nvidia-smi topo -m, nvlink -s; numactl -H" if within else "ethtool -S, ibstat"
        fix = f"check the links of {hosts} ({look}), or leave one out (sbatch --exclude={one.hosts[0]})"
        yield (failure if certain else warning)("links", text, fix)
    if not found:
        for within, what in ((False, "between hosts"), (True, "within a host")):
            speeds = list(_values(measured, measured.bandwidth, within=within))
            delays = list(_values(measured, measured.latency, within=within))
            if speeds:
                text = f"{what} {min(speeds) / 1e9:.3g} to {max(speeds) / 1e9:.3g} GB/s "
                text += f"from rank to rank, {1e6 * statistics.median(delays):.0f} µs"
                yield ok("links", text)


def _values(measured: LinkMeasurements, matrix: Matrix, *, within: bool) -> Iterator[float]:
    for a, row in enumerate(matrix):
        for b, value in enumerate(row):
            if value is not None and (measured.hosts[a] == measured.hosts[b]) == within:
                yield value
