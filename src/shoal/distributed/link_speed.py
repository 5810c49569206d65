"""Measurement of the links between ranks, and of the links, ranks or machines that are slower."""

from __future__ import annotations

import itertools
import math
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal.distributed.device import backend_of
from shoal.util import accelerator
from shoal.util.clock import CLOCK
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.distributed.world import World

BYTES = 4 << 20
REPEATS = 9
_SMALL = 8
_ROUND_TRIPS = 4
"""Number of small messages per measurement: a single one is too short for the clock's noise."""
_FEWEST = 4
"""Fewest links of one kind of which one can be called an exception."""

Matrix = tuple[tuple[float | None, ...], ...]
"""By sender and receiver, in rank order; None for pairs that were not measured."""
Turns = list[list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class LinkMeasurements:
    """Measurements of each pair of ranks; the same on all ranks.

    `bandwidth` is in bytes/s from the sender (row) to the receiver (column): `bytes` in the time until
    the receiver's short answer arrives. `latency` is in seconds one way, for messages of eight bytes.
    `hosts` is the host of each rank.
    """

    bytes: int
    hosts: tuple[str, ...]
    bandwidth: Matrix
    latency: Matrix


@dataclass(frozen=True, kw_only=True)
class SlowPart:
    """A link, rank or machine that is slower than the others of its kind.

    `ranks` are sender and receiver; or one rank, or those of one machine, if most of its links are
    slow. `bandwidth` is the median of its links that are slow, `ratio` the usual bandwidth divided by
    it.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str
    bandwidth: float
    ratio: float


def pairs(
    world: World, *, bytes: int = BYTES, repeats: int = REPEATS, among: Sequence[int] | None = None
) -> LinkMeasurements:
    """Measure every pair of ranks, in both directions. Collective.

    Pairs that have a machine in common take turns, all others are measured at the same time:
    `schedule`. Each rank sends `bytes` to the other and waits for a short answer, `repeats` times after
    a warm-up. The fastest counts, since the search is for lasting causes and not for a momentary load.
    With `among`, only these ranks are measured, for instance one per machine, and the others wait.

    Raises LaunchError for a world of size 1, and for invalid numbers.
    """
    chosen = sorted(set(range(world.size) if among is None else among))
    _check(world, bytes=bytes, repeats=repeats, chosen=chosen)
    hosts = world.gather(socket.gethostname())
    probe = _Probe(world, bytes, repeats)
    sent: dict[int, float] = {}
    answered: dict[int, float] = {}
    for turn in schedule([hosts[rank] for rank in chosen]):
        world.barrier()
        for one, other in turn:
            first, second = chosen[one], chosen[other]
            if world.rank in (first, second):
                peer = second if world.rank == first else first
                answered[peer] = probe.latency(peer, begins=world.rank == first)
                for sender in (first, second):
                    seconds = probe.transfer(peer, sends=world.rank == sender)
                    if world.rank == sender:
                        sent[peer] = seconds
    rows = world.gather((sent, answered))
    return LinkMeasurements(
        bytes=bytes,
        hosts=tuple(hosts),
        bandwidth=_matrix(world.size, lambda a, b: bytes / rows[a][0][b] if b in rows[a][0] else None),
        latency=_matrix(world.size, lambda a, b: rows[min(a, b)][1].get(max(a, b))),
    )


def schedule(hosts: Sequence[str]) -> Turns:
    """Return the turns in which the pairs of the ranks on these machines are measured.

    No two pairs of a turn have a machine in common, so they share no network card, memory or core, and
    a slow rank slows its own pairs only. All pairs at once would measure their contention. One after
    the other would take as many turns as there are pairs: N machines of R ranks take about N R² turns
    instead of N² R² / 2. Pairs within machines come first, then machines against each other as in a
    round-robin tournament (the circle method).
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    machines = list(by_host.values())
    turns = _at_once(itertools.combinations(ranks, 2) for ranks in machines)
    for meetings in _tournament(len(machines)):
        turns += _at_once(itertools.product(machines[a], machines[b]) for a, b in meetings)
    return [[(min(pair), max(pair)) for pair in turn] for turn in turns]


def _at_once(queues: Iterable[Iterable[tuple[int, int]]]) -> Turns:
    """Merge queues turn by turn: the first of all queues, then the second of all, and so on."""
    turns = itertools.zip_longest(*queues)
    return [[pair for pair in turn if pair is not None] for turn in turns]


def _tournament(players: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds in which each player meets another; each pair occurs in one round."""
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def slow(measured: LinkMeasurements, *, factor: float = 3.0) -> list[SlowPart]:
    """Return machines, ranks and single links that are slower than usual by `factor` or more, in this
    order.

    Links within a machine are compared with each other, and so are those between machines. The usual
    bandwidth is the upper quartile: with three ranks, a slow rank has four of all six links. If most
    links of a machine to others, or of a rank, are slow, it is listed instead of them.
    """
    found: list[SlowPart] = []
    for within in (False, True):
        speeds = dict(_links(measured, within=within))
        if len(speeds) < _FEWEST:
            continue
        usual = sorted(speeds.values(), reverse=True)[len(speeds) // 4]
        left = {link: speed for link, speed in speeds.items() if speed * factor <= usual}
        parties = [] if within else list(_machines(measured.hosts))
        parties += [(f"rank {rank}", (rank,)) for rank in range(len(measured.hosts))]
        while left:
            ranks: tuple[int, ...]
            common = _most(left, speeds, parties)
            if common is None:
                ranks = link = next(iter(left))
                what, blamed = f"from rank {link[0]} to rank {link[1]}", [link]
            else:
                what, ranks = common
                blamed = [link for link in left if (link[0] in ranks) != (link[1] in ranks)]
            bandwidth = statistics.median(left.pop(link) for link in blamed)
            hosts = tuple(dict.fromkeys(measured.hosts[rank] for rank in ranks))
            ratio = usual / bandwidth if bandwidth else math.inf
            found.append(
                SlowPart(ranks=ranks, hosts=hosts, what=what, bandwidth=bandwidth, ratio=ratio)
            )
    return found


Link = tuple[int, int]
Party = tuple[str, tuple[int, ...]]


def _links(measured: LinkMeasurements, *, within: bool) -> Iterator[tuple[Link, float]]:
    for sender, row in enumerate(measured.bandwidth):
        for receiver, speed in enumerate(row):
            together = measured.hosts[sender] == measured.hosts[receiver]
            if speed is not None and together == within:
                yield (sender, receiver), speed


def _machines(hosts: Sequence[str]) -> Iterator[Party]:
    """Yield the machines with several ranks; one with a single rank is that rank."""
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, name in enumerate(hosts) if name == host)
        if len(ranks) > 1:
            yield f"machine {host}", ranks


def _most(left: dict[Link, float], all_links: dict[Link, float], parties: list[Party]) -> Party | None:
    """Return the party with the largest fraction of links in `left`, if that is most of its links; else
    None.

    One direction is enough, since a narrow outgoing link does not slow incoming traffic.
    """
    best: tuple[float, Party | None] = (0.5, None)
    for party in parties:
        for end in (0, 1):
            own = [link for link in all_links if link[end] in party[1]]
            share = sum(link in left for link in own) / len(own) if len(own) > 1 else 0.0
            if share > best[0]:
                best = share, party
    return best[1]


def _check(world: World, *, bytes: int, repeats: int, chosen: Sequence[int]) -> None:
    if world.size == 1 or len(chosen) < 2:
        raise LaunchError(
            given=f"pairs of {len(chosen)} rank(s), in a world of {world.size}",
            found="a measurement needs at least two ranks",
            fix="start at least two ranks: shoal run -n 2, srun, mpirun",
        )
    if bytes < 1 or repeats < 1 or not 0 <= chosen[0] <= chosen[-1] < world.size:
        raise LaunchError(
            given=f"pairs(world, bytes={bytes}, repeats={repeats}, among={chosen})",
            found=f"bytes and repeats are at least 1, and ranks are 0 to {world.size - 1}",
            fix=f"pass bytes={BYTES}, repeats={REPEATS}",
        )


class _Probe:
    """The messages of one rank during a measurement."""

    def __init__(self, world: World, bytes: int, repeats: int) -> None:
        # Gloo and MPI send what is in the CPU's memory, wherever the model computes.
        on_device = world.group and backend_of(world.group, world.device) == "nccl"
        self._device = world.device if on_device else torch.device("cpu")
        self._group = world.group
        self._large = torch.empty(bytes, dtype=torch.uint8, device=self._device).fill_(1)
        self._small = self._large.new_ones(_SMALL)
        self._repeats = repeats

    def latency(self, peer: int, *, begins: bool) -> float:
        """Return the seconds one way of small messages back and forth."""
        seconds = self._fastest(lambda: self._to_and_fro(self._small, peer, _ROUND_TRIPS, begins))
        return seconds / (2 * _ROUND_TRIPS)

    def transfer(self, peer: int, *, sends: bool) -> float:
        """Return the seconds from the start of sending to the answer; only the sender uses it."""
        return self._fastest(lambda: self._to_and_fro(self._large, peer, 1, sends))

    def _to_and_fro(self, tensor: torch.Tensor, peer: int, times: int, begins: bool) -> None:
        for _ in range(times):
            if begins:
                dist.send(tensor, peer, group=self._group)
                dist.recv(self._small, peer, group=self._group)
            else:
                dist.recv(tensor, peer, group=self._group)
                dist.send(self._small, peer, group=self._group)
        accelerator.synchronize(self._device)

    def _fastest(self, act: Callable[[], None]) -> float:
        act()  # the first call also connects
        seconds = []
        for _ in range(self._repeats):
            begun = CLOCK.now()
            act()
            seconds.append(CLOCK.now() - begun)
        return min(seconds)


def _matrix(size: int, value: Callable[[int, int], float | None]) -> Matrix:
    return tuple(tuple(None if a == b else value(a, b) for b in range(size)) for a in range(size))
