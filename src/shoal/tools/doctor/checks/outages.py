"""Links between machines that stopped carrying packets while the doctor ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.distributed.interfaces import interfaces
from shoal.distributed.outages import Outage, Probes
from shoal.distributed.rendezvous import answering, listen
from shoal.tools.doctor.findings import CheckResult, RankFacts, failure, ok

if TYPE_CHECKING:
    from shoal.distributed.world import World

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
