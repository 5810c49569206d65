from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from helpers.commands import Command
from shoal.distributed.cpu_affinity import divide, near, rearrange, share, threads


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


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,8-9\n", {0, 1, 2, 8, 9}), ("5\n", {5}), ("\n", set()), (None, set())]
)
def test_cores_near_a_device(tmp_path: Path, text: str | None, cpus: set[int]) -> None:
    if text is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0/local_cpulist").write_text(text)
    assert near("0000:3b:00.0", tmp_path) == cpus
    assert near("", tmp_path) == set()


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


def test_ranks_that_are_not_bound_stay_so() -> None:
    assert rearrange([FIRST, FIRST], [SECOND, FIRST]) == [set(FIRST)] * 2


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
def test_ranks_of_shoal_run_are_bound_again_when_their_gpus_are_known(tmp_path: Path) -> None:
    cpus = divide(os.sched_getaffinity(0), 2)
    (tmp_path / "script.py").write_text(SWAPPED.replace("CPUS", repr(cpus)))
    run = Command([sys.executable, "-m", "shoal", "run", "-n", "2", "script.py"], tmp_path)
    try:
        ended = run.end()
    finally:
        run.clean_up()
    assert ended.code == 0, ended.err
