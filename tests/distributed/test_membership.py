"""Who takes part where some have ended: threads for ranks, over one store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shoal
from shoal.distributed.membership import Survivors

LONG = 600.0


class Ranks:
    """Some ranks, of which those in `ended` are dead, and those in `far` can't be reached."""

    def __init__(self, size: int) -> None:
        store = HashStore()
        self.ended: set[int] = set()
        self.far: set[int] = set()
        self.ranks = [Survivors(store, rank=rank, size=size, gone=self._gone) for rank in range(size)]

    def _gone(self, ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
        return (self.ended | self.far if unreachable else self.ended) & set(ranks)

    def meet(self, *ranks: int) -> list[list[int]]:
        """What each of them is told."""
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: self.ranks[rank].meet(LONG), ranks))


def test_those_that_have_ended_are_left_out_once() -> None:
    ranks = Ranks(4)
    assert ranks.meet(0, 1, 2, 3) == [[]] * 4
    assert [rank.members for rank in ranks.ranks] == [[0, 1, 2, 3]] * 4
    ranks.ended = {1, 2}
    assert ranks.meet(0, 3) == [[1, 2], [1, 2]]
    assert ranks.meet(0, 3) == [[], []]
    assert ranks.ranks[3].members == [0, 3]
    ranks.ended = {0, 1, 2}
    assert ranks.meet(3) == [[0]]


def test_one_that_has_come_and_ended_while_it_waited_is_left_out() -> None:
    """Else the others would wait for it in the collective that follows."""
    ranks = Ranks(3)
    with pytest.raises(shoal.LaunchError):
        ranks.ranks[2].meet(0.0)
    ranks.ended = {2}
    assert ranks.meet(0, 1) == [[2], [2]]


def test_one_that_lives_and_does_not_come_is_named() -> None:
    ranks = Ranks(3)
    with pytest.raises(shoal.LaunchError, match="rank 1-2 is alive and did not join") as caught:
        ranks.ranks[0].meet(0.0)
    assert "a rendezvous that took more than 0 s" in caught.value.given


def test_one_that_can_not_be_reached_is_waited_for_and_then_left_out() -> None:
    """It may come back when the others have gone on."""
    ranks = Ranks(3)
    ranks.far = {2}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: ranks.ranks[rank].meet(0.5), (0, 1)))
    assert found == [[2], [2]]
    with pytest.raises(shoal.LaunchError, match="could not reach its machine, and have continued"):
        ranks.meet(2)
    assert ranks.meet(0, 1) == [[], []]
