"""The plan of a storm and its shrinking, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.tools.chaos.faults import KINDS, Fault, Survey, check_kinds, plan_faults, shrink
from shoal.util.errors import LaunchError

SURVEY = Survey(
    size=3,
    steps=20,
    operations={(rank, step): ("create a #1", "sync a #1") for rank in range(3) for step in (5, 10)},
)


def test_a_seed_gives_the_same_plan() -> None:
    kinds = tuple(KINDS)
    first = plan_faults(4, 30, kinds, SURVEY)
    assert plan_faults(4, 30, kinds, SURVEY) == first
    assert plan_faults(5, 30, kinds, SURVEY) != first
    assert [fault.step for fault in first] == sorted(fault.step for fault in first)


def test_each_fault_has_a_place_in_the_run() -> None:
    faults = plan_faults(0, 200, tuple(KINDS), SURVEY)
    assert {fault.kind for fault in faults} == set(KINDS) - {"kill-worker"}  # there is no worker
    for fault in faults:
        assert fault.rank in range(3)
        if KINDS[fault.kind].during_save:
            assert fault.operation in SURVEY.operations[fault.rank, fault.step]
        else:
            assert not fault.operation
            assert 1 <= fault.step <= 20


def test_each_kind_comes_before_any_comes_twice() -> None:
    faults = plan_faults(1, 4, ("kill", "stop", "kill-all", "segfault"), SURVEY)
    assert len({fault.kind for fault in faults}) == 4


def test_faults_without_a_place_are_an_error() -> None:
    nowhere = Survey(size=1, steps=3, operations={})
    with pytest.raises(LaunchError, match="no place"):
        plan_faults(0, 1, ("kill-in-save", "kill-worker"), nowhere)
    with pytest.raises(LaunchError, match="unknown: flood"):
        check_kinds("kill,flood")
    assert check_kinds("all") == tuple(KINDS)


@pytest.mark.parametrize("needed", [{3}, {0, 9}, {1, 4, 5}, set(range(10))])
def test_a_failing_list_is_shrunk_to_the_items_that_it_needs(needed: set[int]) -> None:
    tried: list[tuple[int, ...]] = []

    def fails(items: Sequence[int]) -> bool:
        tried.append(tuple(items))
        return needed <= set(items)

    assert set(shrink(list(range(10)), fails)) == needed
    assert len(tried) <= 40


def test_places_are_described() -> None:
    fault = Fault(number=0, kind="kill-in-save", rank=1, step=6, operation="rename step-6.partial #1")
    assert fault.place == "rank 1, save of step 6: rename step-6.partial #1"
