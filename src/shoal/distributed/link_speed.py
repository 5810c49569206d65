"""How fast each rank reaches each other, and which link, rank or machine is slower than the rest."""

from __future__ import annotations

import itertools
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal.distributed.backend import backend_of
from shoal.util.errors import LaunchError

if TYPE_CHECKING:
    from shoal.distributed.world import World

BYTES = 4 << 20
REPEATS = 9
_SMALL = 8
_ROUND_TRIPS = 4
"""How many small messages make one measurement: a single one is too short for the clock's noise."""
_FEWEST = 4
"""Of fewer links of one kind none can be called an exception."""

Matrix = tuple[tuple[float | None, ...], ...]
"""By sender and receiver, in the order of the ranks; None where nothing was measured."""
Turns = list[list[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What each pair of ranks was measured to give; the same on all ranks.

    `bandwidth` is in bytes/s from the sender (row) to the receiver (column): `bytes` in the time until
    the receiver's short answer is back. `latency` is in seconds one way, for messages of eight bytes.
    `hosts` is where each rank is.
    """

    bytes: int
    hosts: tuple[str, ...]
    bandwidth: Matrix
    latency: Matrix


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A link, or what is common to slow links, and how it compares with the others of its kind.

    `ranks` are sender and receiver; or one rank, or those of one machine, most of whose links are
    slow. `bandwidth` is the median of its slow links, `ratio` the usual one divided by it.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str
    bandwidth: float
    ratio: float


def pairs(
    world: World, *, bytes: int = BYTES, repeats: int = REPEATS, among: Sequence[int] | None = None
) -> Pairs:
    """Measure every pair of ranks, in both directions; collective.

    Pairs that have a machine in common take turns, all others are measured at once: `schedule`. Each
    rank sends `bytes` to the other and waits for a short answer, `repeats` times after a first one
    that doesn't count. The fastest does: sought is what slows a link always, not what else a machine
    was doing. With `among` only these ranks are measured, for instance one of each machine; the
    others wait.

    Raises LaunchError for a world of one, and for numbers that can't be.
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
    return Pairs(
        bytes=bytes,
        hosts=tuple(hosts),
        bandwidth=_matrix(world.size, lambda a, b: bytes / rows[a][0][b] if b in rows[a][0] else None),
        latency=_matrix(world.size, lambda a, b: rows[min(a, b)][1].get(max(a, b))),
    )


def schedule(hosts: Sequence[str]) -> Turns:
    """The turns in which the pairs of so many ranks, on these machines, are measured.

    No two pairs of a turn have a machine in common. So nothing that could slow both is shared: no
    network card, memory or core; a rank that is slow makes its own pairs slow and no others. All at
    once would measure who gets in whose way, and strictly one after the other takes as long as there
    are pairs: N machines of R ranks take about N R² turns instead of N² R² / 2. Within machines
    first, then machines against each other as in a round-robin tournament (the circle method).
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
    """The first of all queues, then the second of all, as long as there are any."""
    turns = itertools.zip_longest(*queues)
    return [[pair for pair in turn if pair is not None] for turn in turns]


def _tournament(players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which each of so many meets another, each pair in one round and no other."""
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def slow(measured: Pairs, *, factor: float = 3.0) -> list[Slow]:
    """What is slower than usual by `factor` or more: machines, then ranks, then single links.

    Links within a machine are compared with each other, and so are those between machines. Usual is
    the upper quartile: of three ranks one that is slow has four of all six links. Where most links of
    a machine to others, or of a rank, are slow, it is named instead of them.
    """
    found: list[Slow] = []
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
            found.append(Slow(ranks=ranks, hosts=hosts, what=what, bandwidth=bandwidth, ratio=ratio))
    return found


Link = tuple[int, int]
Party = tuple[str, tuple[int, ...]]


def _links(measured: Pairs, *, within: bool) -> Iterator[tuple[Link, float]]:
    for sender, row in enumerate(measured.bandwidth):
        for receiver, speed in enumerate(row):
            together = measured.hosts[sender] == measured.hosts[receiver]
            if speed is not None and together == within:
                yield (sender, receiver), speed


def _machines(hosts: Sequence[str]) -> Iterator[Party]:
    """The machines with several ranks; one with a single rank is that rank."""
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, name in enumerate(hosts) if name == host)
        if len(ranks) > 1:
            yield f"machine {host}", ranks


def _most(left: dict[Link, float], all_links: dict[Link, float], parties: list[Party]) -> Party | None:
    """The first party of those with the largest share of slow links, if that is most of its links.

    In one direction is enough: a narrow way out leaves the way in as it is.
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
            found="nobody to talk to",
            fix="start at least two: shoal run -n 2, srun, mpirun",
        )
    if bytes < 1 or repeats < 1 or not 0 <= chosen[0] <= chosen[-1] < world.size:
        raise LaunchError(
            given=f"pairs(world, bytes={bytes}, repeats={repeats}, among={chosen})",
            found=f"bytes and repeats are 1 or more, and ranks 0 to {world.size - 1}",
            fix=f"for example bytes={BYTES}, repeats={REPEATS}",
        )


class _Probe:
    """The messages of one rank."""

    def __init__(self, world: World, bytes: int, repeats: int) -> None:
        # Gloo and MPI send what is in the CPU's memory, wherever the model computes.
        on_device = world.group and backend_of(world.group, world.device) == "nccl"
        self._device = world.device if on_device else torch.device("cpu")
        self._group = world.group
        self._large = torch.empty(bytes, dtype=torch.uint8, device=self._device).fill_(1)
        self._small = self._large.new_ones(_SMALL)
        self._repeats = repeats

    def latency(self, peer: int, *, begins: bool) -> float:
        """Seconds one way, of small messages to and fro."""
        seconds = self._fastest(lambda: self._to_and_fro(self._small, peer, _ROUND_TRIPS, begins))
        return seconds / (2 * _ROUND_TRIPS)

    def transfer(self, peer: int, *, sends: bool) -> float:
        """Seconds from the begin of sending to the answer; of use to the sender."""
        return self._fastest(lambda: self._to_and_fro(self._large, peer, 1, sends))

    def _to_and_fro(self, tensor: torch.Tensor, peer: int, times: int, begins: bool) -> None:
        for _ in range(times):
            if begins:
                dist.send(tensor, peer, group=self._group)
                dist.recv(self._small, peer, group=self._group)
            else:
                dist.recv(tensor, peer, group=self._group)
                dist.send(self._small, peer, group=self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _fastest(self, act: Callable[[], None]) -> float:
        act()  # the first one also connects
        seconds = []
        for _ in range(self._repeats):
            begun = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - begun)
        return min(seconds)


def _matrix(size: int, value: Callable[[int, int], float | None]) -> Matrix:
    return tuple(tuple(None if a == b else value(a, b) for b in range(size)) for a in range(size))
