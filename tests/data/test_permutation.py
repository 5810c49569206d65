from __future__ import annotations

import copy
import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.permutation import Permutation
from shoal.util.errors import DataError


def test_permutation_of_every_size_to_2000() -> None:
    for size in range(1, 2001):
        found = Permutation(size, seed=size % 3, epoch=size % 5).indices(0, size)
        assert found.dtype == np.int64
        assert np.array_equal(np.sort(found), np.arange(size)), size


def test_permutation_across_many_passes() -> None:
    for size in (2**17 - 1, 2**17, 2**17 + 1, 300_000):
        found = Permutation(size, seed=3).indices(0, size)
        assert np.array_equal(np.sort(found), np.arange(size)), size
        assert not np.array_equal(found, np.arange(size)), size


@pytest.mark.parametrize("size", [2**31 + 1, 2**32, 10**12, 2**61 + 1, 2**62, 2**63 - 1])
def test_indices_of_huge_orders_are_distinct_and_inside(size: int) -> None:
    order = Permutation(size, seed=1)
    ends = [order.indices(0, 50_000), order.indices(size - 50_000, size)]
    found = np.concatenate(ends)
    assert len(np.unique(found)) == len(found)
    assert 0 <= found.min() <= found.max() < size


def test_numbers_never_change() -> None:
    # Resumed runs depend on these: a change here is a change of the checkpoint format.
    assert Permutation(10, seed=0).indices(0, 10).tolist() == [5, 6, 3, 2, 1, 7, 9, 0, 8, 4]
    assert Permutation(1000, seed=7, epoch=2).indices(0, 5).tolist() == [800, 394, 252, 44, 474]
    assert Permutation(10**12, seed=-1).indices(10**11, 10**11 + 3).tolist() == [
        367001727415,
        326831990015,
        888114059885,
    ]
    assert Permutation(2**63 - 1, seed=2**70)[2**62] == 7996979861250576173


def test_without_shuffle_is_the_identity() -> None:
    order = Permutation(2**62, seed=5, shuffle=False)
    assert order[2**61 + 3] == 2**61 + 3
    assert order.indices(2**62 - 3, 2**62).tolist() == [2**62 - 3, 2**62 - 2, 2**62 - 1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_numbers_do_not_depend_on_the_cuts(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 2**63 - 1)))
    width = min(size, 300)
    start = data.draw(st.integers(0, size - width))
    cuts = sorted(data.draw(st.lists(st.integers(start, start + width), max_size=5)))
    order = Permutation(size, seed=data.draw(st.integers()), epoch=data.draw(st.integers(0, 2**40)))
    whole = order.indices(start, start + width)
    edges = [start, *cuts, start + width]
    pieces = [order.indices(low, high) for low, high in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert [order[start + i] for i in (0, width // 2, width - 1)] == [
        whole[0], whole[width // 2], whole[width - 1]
    ]  # fmt: skip


@pytest.mark.parametrize("size", [2**20, 2**19 + 1, 10**12])
def test_long_ranges_equal_their_short_pieces(size: int) -> None:
    order = Permutation(size, seed=9)
    whole = order.indices(1000, 201_000)
    pieces = list(order.blocks(1000, 201_000, block=777))
    assert {len(piece) for piece in pieces[:-1]} == {777}
    assert np.array_equal(np.concatenate(pieces), whole)


def test_reads_like_a_sequence() -> None:
    order = Permutation(100, seed=0)
    assert len(order) == 100
    assert list(order) == order.indices(0, 100).tolist() == [order[i] for i in range(100)]
    assert order.indices(40, 40).tolist() == []
    assert type(order[np.int64(3)]) is int


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_constant() -> None:
    order = Permutation(10**12, seed=0)
    order.indices(0, 1)  # keys

    def consume(count: int) -> Callable[[], object]:
        return lambda: [block[0] for block in order.blocks(10**11, 10**11 + count, block=2**16)]

    few, many = peak_bytes(consume(2**18)), peak_bytes(consume(2**21))
    assert many < few + 10_000
    result = 8 * 2**21
    assert peak_bytes(lambda: order.indices(0, 2**21)) < result + 2 * 2**20
    assert peak_bytes(lambda: order.indices(10**12 - 16, 10**12)) < 20_000


def test_is_a_frozen_value() -> None:
    order = Permutation(1000, seed=1, epoch=2)
    numbers = order.indices(0, 1000).tolist()
    for twin in (
        pickle.loads(pickle.dumps(order)),
        copy.deepcopy(order),
        Permutation(1000, seed=1, epoch=2),
    ):
        assert twin == order
        assert hash(twin) == hash(order)
        assert twin.indices(0, 1000).tolist() == numbers
    assert order != Permutation(1000, seed=1, epoch=3)
    with pytest.raises(FrozenInstanceError):
        order.epoch = 3  # type: ignore[misc]


def test_bad_input() -> None:
    order: Any = Permutation(5, seed=0)
    wrong: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str, str]] = [
        *(
            (Permutation, (n,), {"seed": 0}, f"size={n}", "an integer from 1 to")
            for n in (0, -3, 2**63)
        ),
        (Permutation, (5,), {"seed": 0, "epoch": -1}, "epoch=-1", "0 or more"),
        (Permutation, (2.5,), {"seed": 0}, "size=2.5", "an integer from 1 to"),
        (Permutation, (5,), {"seed": None}, "seed=None", "seed is an integer"),
        (order.__getitem__, (5,), {}, "positions [5, 6)", "positions [0, 5)"),
        (order.__getitem__, (-1,), {}, "positions [-1, 0)", "positions [0, 5)"),
        (order.indices, (0, 6), {}, "positions [0, 6)", "positions [0, 5)"),
        (order.indices, (3, 2), {}, "positions [3, 2)", "positions [0, 5)"),
        (Permutation(5, seed=0, shuffle=False).indices, (0, 6), {}, "positions [0, 6)", "5 samples"),
        (order.blocks, (0, 6), {}, "positions [0, 6)", "positions [0, 5)"),
        (order.blocks, (0, 5), {"block": 0}, "block=0", "1 or more"),
    ]
    for make, positional, options, given_text, found_text in wrong:
        with pytest.raises(DataError) as error:
            make(*positional, **options)
        assert given_text in error.value.given
        assert found_text in error.value.found
        assert error.value.fix


def test_take_gives_what_indices_gives_at_any_positions() -> None:
    order = Permutation(1_000_003, seed=5, epoch=2)
    whole = order.indices(0, 1_000_003)
    positions = np.random.default_rng(0).integers(0, 1_000_003, 70_000)
    assert np.array_equal(order.take(positions), whole[positions])
    with pytest.raises(DataError, match="positions"):
        order.take(np.array([0, 1_000_003]))
