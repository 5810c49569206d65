"""Schedules of pipelines: complete, possible, and as idle as the papers say."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

import shoal
from shoal.distributed.pipeline_schedules import SCHEDULES, PipelineAction
from shoal.strategies.pipeline.schedules import timetable
from shoal.util.errors import StepError


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_does_all_of_its_work_and_after_what_it_needs(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    table = timetable(schedule, ranks, micro_batches)
    stages = ranks * SCHEDULES[schedule].stages
    length = {len(row) for row in table.rows}
    assert len(length) == 1
    ends: dict[PipelineAction, int] = {}
    begins: dict[PipelineAction, int] = {}
    for row in table.rows:
        counted: Counter[PipelineAction] = Counter(work for work in row if work is not None)
        assert all(count == (2 if work.kind == "B" else 1) for work, count in counted.items())
        for time, work in enumerate(row):
            if work is not None:
                begins.setdefault(work, time)
                ends[work] = time + 1
    assert {(w.stage, w.micro) for w in ends if w.kind == "F"} == {
        (stage, micro) for stage in range(stages) for micro in range(micro_batches)
    }
    # A backward is whole, or there are both of its parts.
    backward = Counter((w.stage, w.micro) for w in ends if w.kind in "BI")
    assert set(backward.values()) == {1}
    assert len(backward) == stages * micro_batches
    assert sum(w.kind == "I" for w in ends) == sum(w.kind == "W" for w in ends)
    for work, begun in begins.items():
        if work.kind == "F" and work.stage:
            assert ends[PipelineAction("F", work.stage - 1, work.micro)] <= begun
        if work.kind in "BI":
            assert ends[work._replace(kind="F")] <= begun
        if work.kind in "BI" and work.stage < stages - 1:
            later = [ends.get(PipelineAction(kind, work.stage + 1, work.micro)) for kind in "BI"]
            assert min(end for end in later if end is not None) <= begun


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (8, 32)])
def test_the_bubble_is_that_of_the_papers(schedule: str, ranks: int, micro_batches: int) -> None:
    table = timetable(schedule, ranks, micro_batches)
    assert table.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_more_stages_on_a_rank_wait_less() -> None:
    idle = [timetable(name, 4, 8).bubble for name in ("1f1b", "interleaved", "zero-bubble")]
    assert idle == sorted(idle, reverse=True)


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    def most_kept(schedule: str) -> int:
        kept, most = 0, 0
        for work in dict.fromkeys(timetable(schedule, 4, 8).rows[0]):
            if work is not None:
                kept += 1 if work.kind == "F" else -1
                most = max(most, kept)
        return most

    assert (most_kept("1f1b"), most_kept("gpipe")) == (4, 8)


def test_it_prints_and_draws(tmp_path: Path) -> None:
    table = shoal.Pipeline(split_points=("head",)).timetable(ranks=2, micro_batches=2)
    assert str(table).splitlines() == [
        "rank 0  0F0 0F1 ·   ·   0B0 0B0 ·   0B1 0B1",
        "rank 1  ·   1F0 1B0 1B0 1F1 1B1 1B1 ·   ·",
        "waiting 33%",
    ]
    drawn = ET.parse(table.draw(tmp_path / "deep" / "schedule.svg"))
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 8
    assert "forward of micro-batch 1, stage 0" in titles


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches"),
    [("1f1b", 1, 4), ("1f1b", 4, 0), ("dualpipev", 4, 2), ("interleaved", 4, 9)],
)
def test_what_no_schedule_can_do_is_refused(schedule: str, ranks: int, micro_batches: int) -> None:
    with pytest.raises(StepError):
        timetable(schedule, ranks, micro_batches)


def test_pictures_are_svg(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"must end in \.svg"):
        timetable("1f1b", 2, 2).draw(tmp_path / "schedule.png")
