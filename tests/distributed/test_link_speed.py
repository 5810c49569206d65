"""Which pairs are measured at once, and what is blamed for slow ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

import shoal
from shoal.distributed.link_speed import LinkMeasurements, pairs, schedule, slow

HOSTS = [
    ["a"],
    ["a", "a"],
    ["a"] * 5,
    ["a", "b"],
    ["a", "b", "c"],
    ["a", "a", "b", "b", "b", "c"],
    ["a", "b", "a", "b", "c", "c", "d", "e"],
]


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_pair_has_one_turn_and_each_machine_one_pair_at_a_time(hosts: Sequence[str]) -> None:
    turns = schedule(hosts)
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == list(itertools.combinations(range(len(hosts)), 2))
    for turn in turns:
        machines = [host for one, other in turn for host in {hosts[one], hosts[other]}]
        assert len(machines) == len(set(machines))


def test_machines_meet_at_once() -> None:
    assert len(schedule(["a", "b", "c", "d"])) == 3
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
            found = slow(measured(["a"] * size, with_slow(odd)))
            assert [(each.what, each.ranks, each.hosts) for each in found] == [
                (f"rank {odd}", (odd,), ("a",))
            ]
            assert found[0].bandwidth == 1e8
            assert found[0].ratio == 10


def test_a_narrow_way_out_is_blamed_on_its_sender() -> None:
    assert blamed("abcd", lambda a, b: 1e8 if a == 2 else 1e9) == ["rank 2"]


def test_a_machine_is_blamed_for_all_its_ranks() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    found = slow(measured(hosts, lambda a, b: 1e8 if "b" in (hosts[a], hosts[b]) else 1e9))
    # Inside of the machine its two links are as slow; but there each is compared with its like.
    assert [(each.what, each.ranks) for each in found if each.hosts == ("b",)][:1] == [
        ("machine b", (2, 3))
    ]
    assert all(each.hosts == ("b",) for each in found)


def test_one_slow_link_and_two_troubles_at_once() -> None:
    assert blamed(["a"] * 5, lambda a, b: 1e8 if (a, b) == (1, 3) else 1e9) == ["from rank 1 to rank 3"]
    both = blamed(
        ["a"] * 8,
        lambda a, b: 1e8 if 6 in (a, b) or (a, b) == (1, 3) else 1e9,
    )
    assert both == ["rank 6", "from rank 1 to rank 3"]


def test_links_within_and_between_machines_are_not_compared_with_each_other() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    assert blamed(hosts, lambda a, b: 1e10 if hosts[a] == hosts[b] else 1e9) == []


def test_two_ranks_have_nothing_to_be_compared_with() -> None:
    assert blamed(["a", "a"], lambda a, b: 1.0 if a else 1e9) == []


def test_one_process_has_no_pairs(world: shoal.World) -> None:
    with pytest.raises(shoal.LaunchError, match="a measurement needs at least two ranks"):
        pairs(world)
