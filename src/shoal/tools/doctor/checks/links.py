"""Checks between ranks: the speed of links, outages, and clocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from shoal.distributed.interfaces import interfaces
from shoal.distributed.link_speed import LinkMeasurements, Matrix, pairs, slow
from shoal.distributed.outages import Outage, Probes
from shoal.distributed.rendezvous import answering, listen
from shoal.telemetry import clock_offset
from shoal.tools.doctor.findings import CheckResult, RankFacts, describe_ranks, failure, ok, warning
from shoal.util.clock import CLOCK

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

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


MOST_MACHINES = 64
"""With more machines each calls only that of rank 0, since pairs grow as their square."""

WHAT = "connection"


class LinkProbes:
    """The calls of this rank to the other machines of a world during a block; collective.

    The first rank of each machine makes them. Each rank answers the calls that it receives.
    """

    def __init__(self, world: World, hosts: Sequence[str]) -> None:
        self._world, self._hosts = world, hosts
        self._calls: Probes | None = None
        self._stack = ExitStack()

    def __enter__(self) -> LinkProbes:
        if len(set(self._hosts)) == 1:
            return self
        address = _address(self._world)
        server = self._stack.enter_context(listen(0, address))
        self._stack.enter_context(answering(server, b"\n"))
        # Rank 0 may leave a world that hangs: the others' calls end with their processes.
        everyone = self._world.gather((address, server.getsockname()[1]))
        calls = machines_to_call(self._hosts, everyone, self._world.rank)
        self._calls = self._stack.enter_context(Probes(calls))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self) -> list[dict[str, Any]]:
        """Return the outages that this rank has seen so far."""
        found = [] if self._calls is None else self._calls.outages()
        return [asdict(one) for one in found if one.answered]


def machines_to_call(
    hosts: Sequence[str], everyone: Sequence[tuple[str, int]], rank: int
) -> Mapping[str, tuple[str, int]]:
    """Return the machines that a rank calls: each with the address and the port of its first rank."""
    firsts = {host: hosts.index(host) for host in hosts}
    if firsts[hosts[rank]] != rank:
        return {}
    to = {host: everyone[first] for host, first in firsts.items() if host != hosts[rank]}
    few = len(firsts) <= MOST_MACHINES
    return {host: at for host, at in to.items() if few or firsts[host] == 0}


def _address(world: World) -> str:
    """Return this machine's address on the interface that `shoal.init` has chosen.

    It chooses none if all ranks are on one machine, regardless of their host names.
    """
    chosen = {choice.what: str(choice.value) for choice in world.decisions}
    own = {one.name: one.addresses for one in interfaces()}
    return next(iter(own.get(chosen.get("interface", ""), ())), "127.0.0.1")


def check_outages(ranks: Sequence[RankFacts[list[dict[str, Any]]]]) -> Iterator[CheckResult]:
    """Yield a line for each pair of machines that lost packets, with the longest outage."""
    worst: dict[frozenset[str], tuple[str, Outage]] = {}
    for one in ranks:
        for outage in (Outage(**each) for each in one.facts):
            pair = frozenset((one.host, outage.host))
            # An outage that still lasts takes precedence over any that is over.
            known = worst.get(pair)
            if known is None or (known[1].over, -known[1].seconds) > (outage.over, -outage.seconds):
                worst[pair] = (one.host, outage)
    for here, outage in worst.values():
        there = outage.host
        interface = outage.interface or "the interface"
        fix = f"check the cable and the switch port of {interface} on {here} and {there} "
        fix += f"(ping {outage.address}; ip -s link show), or leave one out (sbatch --exclude={there})"
        dead = "could not reach" if outage.over else "can't reach"
        again = "; then it came back" if outage.over else ", and it is still down"
        yield failure(WHAT, f"{here} {dead} {there}: {outage}{again}", fix)
    if not worst and len({one.host for one in ranks}) > 1:
        yield ok(WHAT, "each machine answered all the time")


_APART = 0.1
_FAR_APART = 60.0


class ClockError(TypedDict):
    """The offset of a rank's clock ahead of rank 0's, and its uncertainty; in seconds."""

    offset: float
    error: float


def measure_clock_offsets(
    store: Store, *, rank: int, asking: Sequence[int], limit: float
) -> ClockError:
    """Return the offset of this rank's clock; rank 0 answers the ranks `asking`, in their order."""
    if rank == 0:
        clock_offset.answer_trips(store, asking, CLOCK.wall_ns, timedelta(seconds=limit))
    elif rank in asking:
        found = clock_offset.ask_offset(store, rank, CLOCK.wall_ns, timedelta(seconds=limit))
        return ClockError(offset=-found.offset / 1e9, error=found.uncertainty / 1e9)
    return ClockError(offset=0.0, error=0.0)


def check_clocks(ranks: Sequence[RankFacts[ClockError]]) -> Iterator[CheckResult]:
    """Yield clocks with a certain offset: files, timelines and certificates depend on them."""
    apart = [one for one in ranks if _certain(one.facts) > _APART]
    for one in apart:
        offset = one.facts["offset"]
        text = (
            f"{describe_ranks([one])} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} "
        )
        text += f"rank 0 ({ranks[0].host})"
        fix = f"run chronyc tracking (or ntpq -p, timedatectl) on {one.host}; ask the administrators"
        far = _certain(one.facts) > _FAR_APART
        yield (failure if far else warning)("clock", text, fix)
    if not apart:
        most = max(abs(one.facts["offset"]) + one.facts["error"] for one in ranks)
        yield ok("clock", f"within {1000 * most:.1f} ms of rank 0's on every host")


def _certain(clock: ClockError) -> float:
    return abs(clock["offset"]) - clock["error"]
