from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.telemetry.events import Events


def record(directory: Path, ranks: list[list[tuple[int, int, int]]], attempt: float = 1.0) -> None:
    """Write the shares (step, start, stop) of each rank as events of one attempt."""
    for rank, shares in enumerate(ranks):
        events = Events(directory / "events" / f"rank-{rank}.jsonl")
        events.write("start", {"began": attempt})
        for step, start, stop in shares:
            share = (start, stop)
            events.step("step", (step, start, stop - start, share, 0.0, (0,) * 10, 0.5, 2.0, 4.0, 0.0))
        events.close()


@pytest.mark.parametrize(
    ("ranks", "missed", "repeated"),
    [
        ([[(1, 0, 4), (2, 8, 12)], [(1, 4, 8), (2, 12, 16)]], [], []),
        ([[(1, 0, 4), (2, 8, 12)], [(1, 4, 8), (2, 13, 16)]], [(12, 13)], []),
        ([[(1, 0, 4), (2, 8, 12)], [(1, 4, 9), (2, 12, 16)]], [], [(8, 9)]),
        ([[(1, 2, 8), (2, 2, 16)]], [(0, 2)], [(2, 8)]),
        ([[(1, 0, 8), (2, 8, 16)], [(1, 0, 0), (2, 8, 8)]], [], []),  # a rank that stands in
    ],
)
def test_what_is_missed_and_what_repeated(
    tmp_path: Path,
    ranks: list[list[tuple[int, int, int]]],
    missed: list[tuple[int, int]],
    repeated: list[tuple[int, int]],
) -> None:
    record(tmp_path, ranks)
    found = shoal.coverage(tmp_path)
    assert (found.end, found.missed, found.repeated) == (16, missed, repeated)
    assert found.exact == (not missed and not repeated)


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    record(tmp_path, [[(1, 0, 4), (2, 8, 12)], [(1, 4, 8), (2, 12, 16)]])
    record(tmp_path, [[(2, 8, 16)]], attempt=2.0)
    assert shoal.coverage(tmp_path) == (16, [], [], [])


def test_a_directory_that_does_not_exist_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(shoal.CheckpointError, match="there is no such directory"):
        shoal.coverage(tmp_path / "runs")
