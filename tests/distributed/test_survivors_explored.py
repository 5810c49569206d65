"""The rendezvous of the survivors, in every order of its steps, with deaths and time-outs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from helpers.exploration.explorer import BrokenPropertyError, Execution, Protocol, explore
from helpers.exploration.mutants import load_variant
from helpers.exploration.shared_store import SharedClock, SharedStore
from shoal.distributed import membership
from shoal.util.errors import LaunchError

LIMIT = 60.0


def survivors(
    old: str = "", new: str = "", *, size: int = 2, times: int = 2, kills: int = 1, early: int = 1
) -> Protocol:
    """Ranks that join the rendezvous `times` times."""
    module = load_variant(membership, old, new)

    def begin(world: Execution) -> Callable[[bool], None]:
        module.CLOCK = SharedClock(world)  # type: ignore[attr-defined]
        store = SharedStore(world)
        joined: dict[tuple[int, int], tuple[int, ...]] = {}
        left: dict[int, str] = {}
        world.mortal |= set(range(size))

        def gone(ranks: Sequence[int], *, unreachable: bool = False) -> set[int]:
            world.current.history.append(("gone", frozenset(world.dead)))
            return set(ranks) & world.dead

        def run(rank: int) -> None:
            here = module.Survivors(store, rank=rank, size=size, gone=gone)
            for number in range(times):
                try:
                    here.meet(LIMIT)
                except LaunchError as error:
                    left[rank] = error.found
                    return
                joined[number, rank] = tuple(here.members)
                absent = [m for m in here.members if f"{number + 1}/{m}" not in world.shared]
                if absent:
                    left[rank] = f"it did not wait for {absent}"

        for rank in range(size):
            world.spawn(f"rank {rank}", rank, partial(run, rank))

        def check(at_end: bool) -> None:
            for number in range(times):
                if len({m for (n, _), m in joined.items() if n == number}) > 1:
                    raise BrokenPropertyError(f"ranks disagree on the members: {joined}")
            for rank, found in left.items():
                raise BrokenPropertyError(f"rank {rank} left: {found}")

        return check

    return Protocol(begin=begin, kills=kills, jumps=(1.0,) * early)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "times", "early"),
    [
        (2, 1, 1),
        pytest.param(2, 2, 1, marks=pytest.mark.long),
        pytest.param(3, 1, 0, marks=pytest.mark.long),
        pytest.param(3, 1, 1, marks=pytest.mark.long),
    ],
)
def test_all_survivors_agree(size: int, times: int, early: int) -> None:
    found = explore(survivors(size=size, times=times, early=early), states=100_000)
    print(found)
    assert found.complete, found
    assert not found.failure, found


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "size"),
    [
        # A rank that has not joined yet counts as one that has.
        ("if not missing:", "if True:", 2),
        # A rank that has ended is waited for.
        ("for member in keys if member not in ended]", "for member in keys]", 2),
        # A rank reads the decision under the number of an earlier rendezvous.
        ("self._meetings += 1", "self._meetings = 1", 2),
        # A later decision replaces the first one.
        pytest.param(
            'compare_set(decided, "", json.dumps(living))',
            "set(decided, json.dumps(living))",
            3,
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_defect_is_found(old: str, new: str, size: int) -> None:
    found = explore(
        survivors(old, new, size=size, times=2 if "_meetings" in old else 1), states=100_000
    )
    print(found)
    assert found.failure
