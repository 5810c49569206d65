"""The arithmetic of groups: each sample once, each group in one micro-batch, its ranks known to all."""

from __future__ import annotations

import itertools

import pytest

from shoal.data.groups import Place, groups_of, piece

CASES = list(itertools.product((1, 5, 16, 33), (1, 2, 3, 5), (1, 2, 4), (None, 1, 4, 7)))


def test_each_sample_is_in_one_piece() -> None:
    for size, ranks, micro_batches, unit in CASES:
        found: list[int] = []
        for number, rank in itertools.product(range(micro_batches), range(ranks)):
            found += range(*piece(Place(size, number, micro_batches, unit), ranks=ranks, rank=rank))
        assert sorted(found) == list(range(size)), (size, ranks, micro_batches, unit)


@pytest.mark.parametrize(("size", "ranks", "micro_batches", "unit"), [c for c in CASES if c[3]])
def test_each_group_is_in_one_micro_batch_and_held_by_the_ranks_that_have_its_samples(
    size: int, ranks: int, micro_batches: int, unit: int
) -> None:
    seen: dict[int, int] = {}
    for number in range(micro_batches):
        place = Place(size, number, micro_batches, unit)
        groups = groups_of(place, ranks=ranks, size=unit)
        leads = []
        for rank, held in enumerate(groups.held):
            start, stop = piece(place, ranks=ranks, rank=rank)
            positions = [
                (each.group, position) for each in held for position in range(each.start, each.stop)
            ]
            assert [position for _, position in positions] == list(range(stop - start))
            assert all(group == (start + position) // unit for group, position in positions)
            leads += [each.group for each in held if each.leads]
            assert held or groups.first == groups.last  # every rank takes part in the exchange
        assert leads == list(range(groups.first, groups.last))  # one rank leads each group
        for group in leads:
            assert seen.setdefault(group, number) == number
        if not groups.shared:
            assert all(len({e.group for e in held}) == len(held) for held in groups.held)
    assert sorted(seen) == list(range(-(-size // unit)))


def test_ranks_with_enough_groups_share_none() -> None:
    place = Place(60, 0, 1, 16)
    assert [piece(place, ranks=3, rank=rank) for rank in range(3)] == [(0, 16), (16, 32), (32, 60)]
    assert not groups_of(place, ranks=3, size=16).shared
    assert groups_of(place, ranks=3, size=16).least == 12
    assert groups_of(Place(60, 0, 1), ranks=3, size=None).shared  # one group, of all
