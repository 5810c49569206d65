"""Which pairs are measured at once, what is blamed for slow ones, and a measurement of real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

import shoal
from helpers.ranks import Ranks
from shoal.distributed.link_speed import LinkMeasurements, pairs, schedule, slow


@pytest.mark.parametrize(
    "hosts", ["a", "aa", "aaaaa", "ab", "abc", "aabbbc", "ababccde"], ids=lambda hosts: str(hosts)
)
def test_each_pair_has_one_turn_and_each_machine_one_pair_at_a_time(hosts: Sequence[str]) -> None:
    turns = schedule(hosts)
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == list(itertools.combinations(range(len(hosts)), 2))
    for turn in turns:
        machines = [host for one, other in turn for host in {hosts[one], hosts[other]}]
        assert len(machines) == len(set(machines))


def test_machines_meet_at_once() -> None:
    assert len(schedule("abcd")) == 3
    assert len(schedule([host for host in "abcdefgh" for _ in range(4)])) == 6 + 7 * 16


def measured(hosts: Sequence[str], speed: Callable[[int, int], float]) -> LinkMeasurements:
    size = len(hosts)
    rows = tuple(tuple(None if a == b else speed(a, b) for b in range(size)) for a in range(size))
    return LinkMeasurements(bytes=1 << 20, hosts=tuple(hosts), bandwidth=rows, latency=rows)


def with_slow(rank: int) -> Callable[[int, int], float]:
    return lambda a, b: 1e8 if rank in (a, b) else 1e9


def blamed(hosts: Sequence[str], speed: Callable[[int, int], float]) -> list[str]:
    return [each.what for each in slow(measured(hosts, speed))]


def test_a_slow_rank_is_blamed_and_not_its_peers() -> None:
    for size in (3, 4, 7):
        for odd in range(size):
            (found,) = slow(measured(["a"] * size, with_slow(odd)))
            assert (found.what, found.ranks, found.hosts) == (f"rank {odd}", (odd,), ("a",))
            assert (found.bandwidth, found.ratio) == (1e8, 10)


def test_a_machine_is_blamed_for_all_its_ranks() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    found = slow(measured(hosts, lambda a, b: 1e8 if "b" in (hosts[a], hosts[b]) else 1e9))
    # Inside of the machine its two links are as slow; but there each is compared with its like.
    assert [(each.what, each.ranks) for each in found if each.hosts == ("b",)][:1] == [
        ("machine b", (2, 3))
    ]
    assert all(each.hosts == ("b",) for each in found)


def test_what_is_slow() -> None:
    def way_out(a: int, b: int) -> float:
        return 1e8 if a == 2 else 1e9

    def link(a: int, b: int) -> float:
        return 1e8 if (a, b) == (1, 3) else 1e9

    assert blamed("abcd", way_out) == ["rank 2"]
    assert blamed("aaaaa", link) == ["from rank 1 to rank 3"]
    both = blamed("a" * 8, lambda a, b: min(link(a, b), with_slow(6)(a, b)))
    assert both == ["rank 6", "from rank 1 to rank 3"]
    # Links within and between machines are not compared with each other; two ranks with nothing.
    assert blamed("aaabbb", lambda a, b: 1e10 if (a < 3) == (b < 3) else 1e9) == []
    assert blamed("aa", lambda a, b: 1.0 if a else 1e9) == []


def test_one_process_has_no_pairs(world: shoal.World) -> None:
    with pytest.raises(shoal.LaunchError, match="a measurement needs at least two ranks"):
        pairs(world)


def all_pairs(world: shoal.World) -> LinkMeasurements:
    return pairs(world, bytes=1 << 16, repeats=2)


def some_pairs(world: shoal.World) -> LinkMeasurements:
    return pairs(world, bytes=1 << 16, repeats=2, among=[2, 0])


def none_at_all(world: shoal.World) -> LinkMeasurements:
    return pairs(world, bytes=0)


@pytest.mark.processes
@pytest.mark.full
def test_pairs_of_ranks() -> None:
    with Ranks(3) as ranks:
        found = ranks.call(all_pairs)
        assert found[0] == found[1] == found[2]
        for sender in range(3):
            for receiver in range(3):
                for matrix in (found[0].bandwidth, found[0].latency):
                    value = matrix[sender][receiver]
                    assert value is None if sender == receiver else value > 0
        assert found[0].latency[0][2] == found[0].latency[2][0]

        [some, *_] = ranks.call(some_pairs)
        measured = [
            (sender, receiver)
            for sender, row in enumerate(some.bandwidth)
            for receiver, value in enumerate(row)
            if value is not None
        ]
        assert measured == [(0, 2), (2, 0)]

        errors = [each.error for each in ranks.attempt(none_at_all)]
        assert all(isinstance(error, shoal.LaunchError) for error in errors)
