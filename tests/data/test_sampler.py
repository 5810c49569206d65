from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.coupling.groups import groups_of, piece
from shoal.data.micro import Place
from shoal.data.orders import Shuffled
from shoal.data.permutation import Permutation
from shoal.data.sampler import LocalBatch, RankSampler, cut

SIZES = st.integers(1, 60)
RANKS = st.integers(1, 9)
MICROS = st.integers(1, 5)


def sampler(rank: int = 0, **options: int | bool) -> RankSampler:
    defaults = {"batch_size": 16, "ranks": 3, "micro_batches": 2, "seed": 5, "drop_last": False}
    size, shuffle = int(options.pop("size", 101)), bool(options.pop("shuffle", True))
    order = Shuffled(size, shuffle=shuffle)
    return RankSampler(order=order, rank=rank, **(defaults | options))  # type: ignore[arg-type]


@given(SIZES, RANKS, MICROS)
def test_cells_partition_any_batch(size: int, ranks: int, micro_batches: int) -> None:
    cells = [
        cell
        for rank in range(ranks)
        for cell in cut(size, ranks=ranks, rank=rank, micro_batches=micro_batches)
    ]
    assert len(cells) == ranks * micro_batches
    real = [cell for cell in cells if cell.weight == 1.0]
    assert list(itertools.chain(*(range(cell.start, cell.stop) for cell in real))) == list(range(size))
    lengths = [cell.stop - cell.start if cell.weight else 0 for cell in cells]
    assert max(lengths) - min(lengths) <= 1
    # A cell without samples stands in with the first.
    assert all((cell.start, cell.stop) == (0, 1) for cell in cells if cell.weight != 1.0)


@given(SIZES, MICROS, st.lists(st.integers(1, 60), min_size=2, max_size=5), st.sampled_from([None, 4]))
def test_ranks_in_proportion_have_each_sample_once(
    size: int, micro_batches: int, proportions: list[int], unit: int | None
) -> None:
    real: list[int] = []
    for rank in range(len(proportions)):
        for cell in cut(
            size,
            ranks=len(proportions),
            rank=rank,
            micro_batches=micro_batches,
            unit=unit,
            proportions=tuple(proportions),
        ):
            real += range(cell.start, cell.stop) if cell.weight else ()
    assert sorted(real) == list(range(size))


def positions(share: LocalBatch) -> list[int]:
    """The positions since the start of training that a share consumes."""
    real = [cell for cell in share.cells if cell.weight]
    return [share.first + place for cell in real for place in range(cell.start, cell.stop)]


@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    start=st.integers(0, 450),
    block=st.sampled_from([1, 2, 7, 64]),
)
def test_shares_cover_every_position_once_from_anywhere(
    size: int, batch_size: int, ranks: int, micro_batches: int, start: int, block: int
) -> None:
    until = 2 * size
    found: list[int] = []
    batches = []
    for rank in range(ranks):
        mine = sampler(rank, size=size, batch_size=batch_size, ranks=ranks, micro_batches=micro_batches)
        shares = list(itertools.chain(*mine.shares(start, until, block)))
        batches.append([(share.first, share.size) for share in shares])
        found += itertools.chain(*(positions(share) for share in shares))
    assert sorted(found) == list(range(start, until))
    assert all(cuts == batches[0] for cuts in batches)


def test_indices_are_those_of_the_order() -> None:
    for share in itertools.chain(
        *(mine for rank in range(3) for mine in sampler(rank).shares(0, 303, 4))
    ):
        epoch, offset = divmod(share.first, 101)
        order = Permutation(101, seed=5, epoch=epoch)
        places = [p for cell in share.cells for p in range(offset + cell.start, offset + cell.stop)]
        assert share.indices.tolist() == [order[place] for place in places]


def test_a_list_of_shares_is_no_longer_than_asked_and_stays_within_an_epoch() -> None:
    for shares in sampler().shares(0, 303, 4):
        assert 1 <= len(shares) <= 4
        assert len({share.first // 101 for share in shares}) == 1


def test_the_block_changes_nothing() -> None:
    one, many = (list(itertools.chain(*sampler().shares(37, 303, block))) for block in (1, 64))
    assert [(s.first, s.size, s.cells) for s in one] == [(s.first, s.size, s.cells) for s in many]
    assert all(np.array_equal(a.indices, b.indices) for a, b in zip(one, many, strict=True))
    assert [share.size for share in one] == [16] * 4 + ([16] * 6 + [5]) * 2  # from sample 37 on


def test_drop_last_leaves_out_the_short_batch_and_other_samples_in_each_epoch() -> None:
    whole = sampler(ranks=1, micro_batches=1, drop_last=True)
    assert whole.epoch_size == 96
    shares = list(itertools.chain(*whole.shares(0, 2 * 96, 64)))
    assert [share.size for share in shares] == [16] * 12
    epochs = [
        {int(i) for share in shares if share.first // 96 == epoch for i in share.indices}
        for epoch in (0, 1)
    ]
    assert [len(epoch) for epoch in epochs] == [96, 96]
    assert epochs[0] != epochs[1]


def test_without_shuffle_positions_are_indices() -> None:
    shares = itertools.chain(*sampler(ranks=1, micro_batches=1, shuffle=False).shares(0, 101, 64))
    assert list(itertools.chain(*(share.indices.tolist() for share in shares))) == list(range(101))


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
