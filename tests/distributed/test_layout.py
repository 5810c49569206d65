from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.layout import AXES, Layout
from shoal.util.errors import LayoutError

DEGREES = st.integers(1, 4)
LAYOUTS = st.builds(
    Layout, replicate=DEGREES, shard=DEGREES, context=DEGREES, tensor=DEGREES, pipeline=DEGREES
)


def test_neighbouring_ranks_share_the_axes_that_talk_most() -> None:
    layout = Layout(pipeline=2, replicate=2, tensor=2)
    assert [layout.coordinate(rank, "tensor") for rank in range(8)] == [0, 1] * 4
    assert [layout.coordinate(rank, "replicate") for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [layout.coordinate(rank, "pipeline") for rank in range(8)] == [0] * 4 + [1] * 4
    assert list(layout.groups("tensor")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(layout.groups("pipeline")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    # Model-parallel peers take the same samples.
    layout = Layout(replicate=2, shard=2, tensor=2)
    assert layout.data_size == 4
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    # A large world is grouped at once.
    layout = Layout(replicate=512, shard=64, tensor=8)
    groups = list(layout.groups("replicate"))
    assert len(groups) == 64 * 8
    assert groups[-1] == tuple(range(64 * 8 - 1, layout.size, 64 * 8))
    # Text names only what is not one.
    assert str(Layout()) == "replicate=1"
    assert str(Layout(tensor=4, replicate=2)) == "replicate=2,tensor=4"
    assert Layout.parse(" shard = -1 , tensor=2,") == Layout(shard=-1, tensor=2)


@given(LAYOUTS)
def test_coordinates_name_each_rank_once(layout: Layout) -> None:
    found = [tuple(layout.coordinate(r, axis) for axis in AXES) for r in range(layout.size)]
    assert sorted(found) == list(itertools.product(*(range(layout.degree(a)) for a in AXES)))


@given(LAYOUTS, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(layout: Layout, axes: set[str]) -> None:
    groups = list(layout.groups(*axes))
    assert sorted(itertools.chain(*groups)) == list(range(layout.size))
    for group in groups:
        assert all(layout.group(rank, *axes) == group for rank in group)


@given(LAYOUTS)
def test_data_ranks_are_numbered_without_gaps_and_equally_often(layout: Layout) -> None:
    ranks = [layout.data_rank(rank) for rank in range(layout.size)]
    times = layout.size // layout.data_size
    assert sorted(ranks) == sorted(list(range(layout.data_size)) * times)


@given(LAYOUTS, st.sampled_from(AXES))
def test_text_reads_back_and_an_open_axis_takes_what_the_others_leave(
    layout: Layout, axis: str
) -> None:
    written = Layout(**({name: layout.degree(name) for name in AXES} | {axis: -1}))
    assert Layout.parse(str(written)) == written
    assert Layout.parse(str(layout)) == layout
    assert written.resolve(layout.size) == layout


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no axis"),
        ("replicas=2", "'replicas=2' is not one of"),
        ("replicate", "'replicate' is not one of"),
        ("replicate=two", "'replicate=two' is not one of"),
        ("replicate=2,replicate=2", "'replicate' appears twice"),
        ("replicate=0", "a degree is a positive integer"),
        ("replicate=-2", "a degree is a positive integer"),
        ("replicate=-1,shard=-1", "only one degree"),
    ],
)
def test_text_that_is_no_layout(text: str, found: str) -> None:
    with pytest.raises(LayoutError, match=found) as raised:
        Layout.parse(text)
    assert raised.value.fix


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [
        ("replicate=2", 4, "need 2 processes"),
        ("replicate=4", 2, "need 4 processes"),
        ("replicate=-1,tensor=3", 4, "need a multiple of 3 processes"),
    ],
)
def test_a_layout_that_does_not_fit_the_world(text: str, size: int, found: str) -> None:
    with pytest.raises(LayoutError, match=found) as raised:
        Layout.parse(text).resolve(size)
    assert f"layout='{text}' on {size} process(es)" in raised.value.given
