"""Pairs of real ranks: everyone gets the same matrix, and chosen ranks alone can be measured."""

from __future__ import annotations

import pytest

import shoal
from helpers.ranks import Ranks
from shoal.distributed import link_speed

pytestmark = [pytest.mark.processes, pytest.mark.full]


def all_pairs(world: shoal.World) -> link_speed.LinkMeasurements:
    return link_speed.pairs(world, bytes=1 << 16, repeats=2)


def some_pairs(world: shoal.World) -> link_speed.LinkMeasurements:
    return link_speed.pairs(world, bytes=1 << 16, repeats=2, among=[2, 0])


def none_at_all(world: shoal.World) -> link_speed.LinkMeasurements:
    return link_speed.pairs(world, bytes=0)


def test_pairs() -> None:
    with Ranks(3) as ranks:
        found = ranks.call(all_pairs)
        assert found[0] == found[1] == found[2]
        for sender in range(3):
            for receiver in range(3):
                for matrix in (found[0].bandwidth, found[0].latency):
                    value = matrix[sender][receiver]
                    assert (value is None) == (sender == receiver)
                    assert value is None or value > 0
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
