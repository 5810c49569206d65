from __future__ import annotations

import pytest

from shoal.distributed.cpu_affinity import divide, share, threads


@pytest.mark.parametrize(("cpus", "processes"), [(8, 1), (8, 2), (8, 3), (7, 4), (5, 5), (64, 12)])
def test_shares_are_disjoint_and_leave_nothing_idle(cpus: int, processes: int) -> None:
    # Numbers that this machine does not have: their place is their number.
    numbers = range(100_000, 100_000 + cpus)
    shares = divide(numbers, processes)
    assert sorted(cpu for one in shares for cpu in one) == list(numbers)
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1


def test_more_processes_than_cores_share_all() -> None:
    assert divide({3, 4}, 3) == [{3, 4}] * 3


def test_threads_of_a_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux numbers the second threads of all cores after the first ones."""
    monkeypatch.setattr("shoal.distributed.cpu_affinity._place", lambda cpu: (0, cpu % 4, cpu))
    assert divide(range(8), 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]


@pytest.mark.parametrize(
    ("mine", "neighbours", "cores"),
    [
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 2, 2),  # not bound: shared
        ([0, 1], [[0, 1], [2, 3]], 2),  # bound: one's own
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 3, 1),
        ([0], [[0]] * 4, 1),  # too few for all
        ([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5]], 2),
    ],
)
def test_what_is_a_ranks_own(mine: list[int], neighbours: list[list[int]], cores: int) -> None:
    assert share(mine, neighbours).value == cores


@pytest.mark.parametrize(
    ("now", "variable", "launcher", "wanted"),
    [
        (1, "1", "torchrun", 4),  # torchrun's own 1 is not inherited
        (3, "1", "torchrun", 3),  # the script has chosen since
        (2, "2", "torchrun", 2),
        (1, "1", "srun", 1),  # the user's word, or the site's
        (8, "8", "srun", 8),
        (16, "", "srun", 4),  # torch counted cores that others use too
        (1, "", "Open MPI", 1),  # the script has chosen fewer
    ],
)
def test_threads_of_a_rank_with_four_cores(now: int, variable: str, launcher: str, wanted: int) -> None:
    """FAILURES 27: torchrun's own OMP_NUM_THREADS=1 is not silently inherited."""
    assert threads(4, now=now, variable=variable, launcher=launcher).value == wanted
