from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.scripts import Script
from shoal.distributed.cpu_affinity import divide, near, rearrange, share


def test_shares_are_disjoint_and_leave_nothing_idle() -> None:
    for cpus, processes in ((8, 1), (8, 2), (8, 3), (7, 4), (5, 5), (64, 12)):
        # Numbers that this machine does not have: their place is their number.
        numbers = range(100_000, 100_000 + cpus)
        shares = divide(numbers, processes)
        assert sorted(cpu for one in shares for cpu in one) == list(numbers)
        sizes = [len(one) for one in shares]
        assert max(sizes) - min(sizes) <= 1
    assert divide({3, 4}, 3) == [{3, 4}] * 3  # too few: all share them


def test_threads_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux numbers the second threads of all cores after the first ones."""
    monkeypatch.setattr("shoal.distributed.cpu_affinity._place", lambda cpu: (0, cpu % 4, cpu))
    assert divide(range(8), 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]


@pytest.mark.parametrize(
    ("mine", "neighbours", "cores", "reason"),
    [
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, 2, "split among 2 ranks"),  # not bound: shared
        ([0, 1], [[0, 1], [2, 3]], 2, "bound to this rank only"),
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 3, 1, "split among 3 ranks"),
        ([0], [[0]] * 4, 1, ""),  # too few for all
        ([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5]], 2, "split among 2 ranks"),
    ],
)
def test_what_is_a_ranks_own(
    mine: list[int], neighbours: list[list[int]], cores: int, reason: str
) -> None:
    choice = share(mine, neighbours)
    assert choice.value == cores
    assert reason in choice.reason


def test_cores_near_a_device(tmp_path: Path) -> None:
    assert near("0000:3b:00.0", tmp_path) == near("", tmp_path) == set()
    (tmp_path / "0000:3b:00.0").mkdir()
    for text, cpus in (("0-2,8-9\n", {0, 1, 2, 8, 9}), ("5\n", {5}), ("\n", set())):
        (tmp_path / "0000:3b:00.0/local_cpulist").write_text(text)
        assert near("0000:3b:00.0", tmp_path) == cpus


FIRST, SECOND = range(100_000, 100_004), range(100_004, 100_008)  # two sockets of another machine
QUARTERS = [set(range(start, start + 2)) for start in range(100_000, 100_008, 2)]


@pytest.mark.parametrize(
    ("close", "order"),
    [
        ([FIRST, FIRST, SECOND, SECOND], [0, 1, 2, 3]),
        ([SECOND, SECOND, FIRST, FIRST], [2, 3, 0, 1]),
        ([SECOND, FIRST, SECOND, FIRST], [2, 0, 3, 1]),
        ([FIRST, FIRST, FIRST, FIRST], [0, 1, 2, 3]),  # no core is left idle
        ([QUARTERS[2], QUARTERS[0], QUARTERS[3], QUARTERS[1]], [2, 0, 3, 1]),
        ([SECOND, SECOND, FIRST, ()], [0, 1, 2, 3]),  # as before, where one is not known
    ],
)
def test_each_rank_has_the_cores_near_its_gpu(close: list[range], order: list[int]) -> None:
    assert rearrange(QUARTERS, close) == [QUARTERS[quarter] for quarter in order]
    assert rearrange([FIRST, FIRST], [SECOND, FIRST]) == [set(FIRST)] * 2  # not bound: they stay so


def test_the_reason_names_the_gpu() -> None:
    choice = share([0, 1], [[0, 1], [2, 3]], pci="0000:3b:00.0", near=[0, 1, 4])
    assert choice.reason == (
        "2 core(s) in its affinity, bound to this rank only, 2 of them near its GPU (0000:3b:00.0)"
    )
    choice = share([0, 1], [[0, 1], [2, 3]], pci="0000:3b:00.0")
    assert choice.reason.endswith("; the system does not say which are near its GPU (0000:3b:00.0)")


SWAPPED = """
import os
from pathlib import Path
import shoal
from shoal.distributed import cpu_affinity

rank, before = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
cpu_affinity.near = lambda pci: CPUS[1 - rank]
with shoal.init() as world:
    after = sorted(os.sched_getaffinity(0))
    reason = next(choice for choice in world.decisions if choice.what == "cores").reason
    assert world.gather(before) == world.gather(after)[::-1], (before, after)
    assert "of them near its GPU" in reason, reason
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_shoal_run_are_bound_again_when_their_gpus_are_known(
    start: Callable[..., Script],
) -> None:
    cpus = divide(os.sched_getaffinity(0), 2)
    ended = start(SWAPPED.replace("CPUS", repr(cpus))).end()
    assert ended.code == 0, ended.err
