"""The page of `shoal watch` as a pure function: it fits, whatever the run and the terminal."""

from __future__ import annotations

import math
import string
import unicodedata
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from shoal.tools.report import PALETTE, SHOWN
from shoal.tools.report.dashboard.charts import (
    divide_cells,
    draw_bar,
    draw_curve,
    draw_sparkline,
    resample,
)
from shoal.tools.report.dashboard.curves import Tracks
from shoal.tools.report.dashboard.layout import count_turns, dashboard_lines
from shoal.tools.report.dashboard.rank_table import count_leaves, select_ranks
from shoal.tools.report.dashboard.snapshot import (
    CheckpointStatus,
    Kind,
    MetricCurve,
    RankStats,
    Restarts,
    RunProgress,
    RunStatus,
    Slowest,
    Snapshot,
)
from shoal.tools.report.dashboard.terminal import parse_keys
from shoal.tools.report.dashboard.theme import PARTS, TerminalStyle
from shoal.util.units import compact

NAMES = [part.name for part in PARTS]
PLAIN = TerminalStyle(colour=False)
ASCII = TerminalStyle(colour=False, unicode=False)
LOOKS = [TerminalStyle(), PLAIN, ASCII]


def rank(number: int, **parts: float) -> RankStats:
    usual = {"wait": 0.01, "forward": 0.1, "backward": 0.2, "communication": 0.03, "update": 0.02}
    return RankStats(
        number=number, host=f"node{number // 4}", parts=usual | parts, memory=3_200_000_000 + number
    )


def running(ranks: int = 4, **changes: Any) -> Snapshot:
    """Rank 2 is slow in its data, and the others wait for it."""
    every = [rank(n, waiting=0.05) for n in range(ranks)]
    if ranks > 2:
        every[2] = rank(2, wait=0.06)
    values = tuple(2.5 * math.exp(-n / 40) + 0.1 for n in range(200))
    snapshot = Snapshot(
        run="runs/digits",
        clock="14:02:31",
        state=RunStatus(kind="running"),
        verdict="71 % efficient: 19 % exposed communication, 8 % data (rank 2 on node0).",
        size=ranks,
        progress=RunProgress(
            step=5230,
            position=2_677_760,
            goal=5_120_000,
            epoch_size=1_024_000,
            left=2232.0,
            elapsed=2467.0,
        ),
        loss=MetricCurve(first=1, last=5230, values=values, now=0.1432),
        throughput=MetricCurve(first=1, last=5230, values=(12e3,) * 100 + (6e3,) * 100, now=6e3),
        ranks=tuple(every),
        window=200,
        slowest=Slowest(rank=2, host="node0", part="wait", excess=0.05, since=4100),
        saves=CheckpointStatus(step=5000, ago=12, seconds=0.8, blocked=0.03, next_step=5500, due=101.0),
        restarts=Restarts(count=1, last="the previous attempt was preempted by SIGTERM"),
    )
    return replace(snapshot, **changes)


def shown(
    snapshot: Snapshot, width: int, height: int, look: TerminalStyle = PLAIN, leaf: int = 0
) -> list[str]:
    return [line.plain for line in dashboard_lines(snapshot, width, height, look, leaf=leaf, keys=True)]


# Texts that others wrote: controls, colours, wide and joined signs, marks that reorder.
TEXTS = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["\x1b[2J\x1b[31m", "a\nb\rc", "[bold]x[/bold]", "实验" * 30, "👩‍👩‍👧‍👦" * 5, "é\u202e"]
    ),
)
NUMBERS = st.one_of(st.floats(), st.floats(0, 10), st.integers(-10, 10**20).map(float))
COUNTS = st.integers(0, 10**15)
CURVES = st.builds(
    MetricCurve,
    first=COUNTS,
    last=COUNTS,
    values=st.lists(NUMBERS, max_size=50).map(tuple),
    now=st.none() | NUMBERS,
)
RANKS = st.builds(
    RankStats,
    number=st.integers(0, 2000),
    host=TEXTS,
    parts=st.dictionaries(st.sampled_from(NAMES), NUMBERS),
    memory=st.none() | COUNTS,
)
ALL = running(1000).ranks
MANY = st.integers(1, 1000).map(lambda count: ALL[:count])
SNAPSHOTS = st.builds(
    Snapshot,
    run=TEXTS,
    clock=TEXTS,
    state=st.builds(RunStatus, kind=st.sampled_from(get_args(Kind)), since=NUMBERS, reason=TEXTS),
    verdict=TEXTS,
    size=st.integers(0, 1000),
    progress=st.none()
    | st.builds(
        RunProgress,
        step=COUNTS,
        position=COUNTS,
        goal=st.none() | COUNTS,
        epoch_size=st.none() | COUNTS,
        left=st.none() | NUMBERS,
        elapsed=NUMBERS,
    ),
    loss=st.none() | CURVES,
    throughput=st.none() | CURVES,
    ranks=MANY | st.lists(RANKS, max_size=8).map(tuple),
    missing=st.lists(COUNTS, max_size=20).map(tuple),
    window=COUNTS,
    slowest=st.none()
    | st.builds(Slowest, rank=COUNTS, host=TEXTS, part=TEXTS, excess=NUMBERS, since=st.none() | COUNTS),
    saves=st.builds(
        CheckpointStatus,
        step=st.none() | COUNTS,
        ago=NUMBERS,
        seconds=NUMBERS,
        blocked=NUMBERS,
        next_step=st.none() | COUNTS,
        due=st.none() | NUMBERS,
        failed=TEXTS,
    ),
    restarts=st.builds(Restarts, count=COUNTS, last=TEXTS),
)


@given(
    snapshot=SNAPSHOTS,
    width=st.integers(1, 220),
    height=st.integers(1, 60),
    look=st.sampled_from(LOOKS),
    leaf=st.integers(0, 100),
    keys=st.booleans(),
)
@settings(max_examples=25)
def test_whatever_the_run_it_fits(
    snapshot: Snapshot, width: int, height: int, look: TerminalStyle, leaf: int, *, keys: bool
) -> None:
    lines = dashboard_lines(snapshot, width, height, look, leaf=leaf, keys=keys)
    assert len(lines) <= height
    for line in lines:
        assert line.cell_len <= width
        assert not {"Cc", "Cf", "Cs", "Mn", "Me"} & {unicodedata.category(sign) for sign in line.plain}
        if not look.unicode:
            assert line.plain.isascii()


def test_a_page_of_80_columns_says_all() -> None:
    text = "\n".join(shown(running(), 80, 24))
    for words in (
        "runs/digits · running",
        "4 ranks on 1 host · 14:02:31",
        "71 % efficient: 19 % exposed communication, 8 % data (rank 2 on node0).",
        "52.3 % · step 5,230 · epoch 2.62/5 · 37:12 left",
        "loss 0.1432",
        "throughput 6,000 samples/s",
        "step time by rank, mean of 200 steps",
        "410 ms   3.2 GB",
        "D data",
        "w waits for the slowest",
        "rank 2 on node0 in data: 50 ms above the others, since step 4,100",
        "step 5,000, 12 s ago; next 5,500 in 1:41; took 800 ms, 30 ms blocked",
        "1; the previous attempt was preempted by SIGTERM",
        "q quit",
    ):
        assert words in text
    assert len(shown(running(), 80, 24)) == 24


def test_a_page_of_40_columns_and_12_lines_still_says_the_main_things() -> None:
    lines = shown(running(64), 40, 12)
    text = "\n".join(lines)
    for words in ("running", "71 % efficient", "52.3 %", "step 5,230", "37:12 left", "loss 0.1432"):
        assert words in text
    assert any(line.startswith("▸2 D") for line in lines)
    assert "slowest   rank 2" in text
    assert "saved     step 5,000" in text


def test_it_says_how_the_run_is() -> None:
    for state, words in (
        (RunStatus(kind="silent", since=40), "silent for 40 s"),
        (RunStatus(kind="ended", since=185, reason="after step 9"), "ended 3 min ago"),
        (RunStatus(kind="preempted", since=5, reason="by SIGTERM on rank 0"), "by SIGTERM on rank 0"),
        (RunStatus(kind="failed", since=5, reason="ValueError on rank 1"), "ValueError on rank 1"),
        (RunStatus(kind="reading"), "reading events"),
    ):
        assert words in "\n".join(shown(running(state=state), 80, 24))


def test_a_run_that_is_over_has_no_time_left_and_no_next_checkpoint() -> None:
    text = "\n".join(shown(running(state=RunStatus(kind="ended")), 120, 30))
    assert "in 41:07" in text
    assert " left" not in text
    assert "next" not in text


def test_the_step_reads_without_colour() -> None:
    """Each part of a bar consists of its letter, as many of them as its share."""
    parts = {"wait": 1.0, "forward": 2.0, "backward": 4.0, "waiting": 1.0}
    assert draw_bar(parts, 8.0, 16, PLAIN).plain == "DDFFFFBBBBBBBBww"
    assert draw_bar(parts, 16.0, 16, PLAIN).plain == "DFFBBBBw        "
    coloured = draw_bar(parts, 8.0, 16, TerminalStyle())
    assert coloured.plain == "D F   B       w "
    assert len({span.style for span in coloured.spans}) == 4


def test_letters_and_colours_tell_the_parts_apart() -> None:
    styles = {part.style(TerminalStyle()) for part in PARTS}
    assert len({part.letter for part in PARTS}) == len(styles) == len(PARTS)
    assert {part.name for part in PARTS} == set(PALETTE) == set(SHOWN)
    assert set("".join(part.letter for part in PARTS)) <= set(string.ascii_letters)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=10), st.integers(0, 300))
def test_shares_fill_the_bar(parts: list[float], cells: int) -> None:
    given = divide_cells(parts, cells)
    assert sum(given) == (cells if math.fsum(parts) > 0 else 0)
    for part, each in zip(parts, given, strict=True):
        assert 0 <= each <= part * cells / (math.fsum(parts) or 1) + 1


def test_ranks_that_do_not_fit_are_summed_up() -> None:
    snapshot = running(64)
    choice = select_ranks(snapshot, 10, 0, PLAIN)
    numbers = [each.number for each in choice.shown]
    assert len(numbers) == 9
    assert numbers[0] == 2
    assert choice.said.startswith("the 6 slowest and the 3 fastest of 64; 55 others: 360 ms to 360 ms")
    assert [each.number for each in select_ranks(running(4), 4, 0, PLAIN).shown] == [0, 1, 2, 3]


@given(st.integers(2, 300), st.integers(2, 50))
def test_leaves_show_each_rank_once(count: int, room: int) -> None:
    snapshot = running(count)
    last = count_leaves(snapshot, room)
    pages = [select_ranks(snapshot, room, leaf, PLAIN) for leaf in range(1, last + 1)]
    assert all(len(each.shown) < room for each in pages)
    listed = [each.number for choice in pages for each in choice.shown]
    assert listed == (list(range(count)) if count > room else [])


def test_the_footer_offers_leaves_where_there_are_some() -> None:
    assert count_turns(running(4), 80, 24, PLAIN) == 0
    assert "↓" not in shown(running(4), 80, 24)[-1]
    assert count_turns(running(64), 80, 24, PLAIN) > 1
    assert "↑ ↓ page through all ranks" in shown(running(64), 80, 24)[-1]
    assert any(line.startswith("ranks 0 to ") for line in shown(running(64), 80, 24, leaf=1))


def test_curves_rise_and_fall() -> None:
    values = [float(n) for n in range(40)]
    lines = [line.plain for line in draw_curve(values, 30, 4, PLAIN, zero=False)]
    assert lines[0].startswith("39 ")
    assert lines[-1].startswith(" 0 ")
    assert [line[3:].strip(" ") != "" for line in lines] == [True] * 4
    assert lines[0].rstrip().endswith(lines[0].strip()[-1])
    assert lines[-1][3] != " "
    assert lines[0][3] == " "
    assert draw_sparkline(values, 8, PLAIN, zero=True) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline(values, 8, ASCII, zero=True).isascii()


def test_a_column_of_several_rates_is_samples_over_time() -> None:
    """100 samples in 1 s and 100 in 9 s are 20 a second, not the mean of 100 and 11."""
    assert resample([100.0, 100 / 9], 1, [1.0, 9.0]) == pytest.approx([20.0])
    assert resample([100.0, 20.0], 1) == [60.0]
    tracks = Tracks()
    tracks.add(np.arange(2), np.ones(2), np.full(2, 100), np.array([1.0, 9.0]))
    found = tracks.throughput()
    assert found is not None
    assert resample(found.values, 1, found.weights) == pytest.approx([20.0])


def test_one_step_does_not_set_the_axis_of_the_throughput() -> None:
    steady = [100.0 + n % 7 for n in range(60)]
    odd = [*steady, 90_000.0]
    for width in (20, 200):
        assert float(draw_curve(odd, width, 4, PLAIN, zero=True)[0].plain.split()[0]) <= 106
    assert draw_curve(odd, 200, 4, PLAIN, zero=True)[0].plain.rstrip().endswith("█")
    assert draw_curve([6e3] * 30 + [12e3] * 30, 40, 4, PLAIN, zero=True)[0].plain.startswith("12k ")


def test_gaps_stay_gaps_and_nothing_is_drawn_of_nothing() -> None:
    assert draw_sparkline([1.0, math.nan, 2.0], 3, PLAIN, zero=False) == "▁ █"
    assert [line.plain for line in draw_curve([math.nan], 30, 3, PLAIN, zero=False)] == ["", "", ""]


def test_losses_of_many_sizes_have_a_logarithmic_scale() -> None:
    values = [10.0**-n for n in range(8)]
    lines = [line.plain for line in draw_curve(values, 40, 8, ASCII, zero=False)]
    tops = [
        min(row for row, line in enumerate(lines) if line[8:][x : x + 1].strip()) for x in range(32)
    ]
    assert tops == sorted(tops)
    assert len(set(tops)) == 8


def test_numbers_on_scales_are_short() -> None:
    for value, text in (
        (0, "0"),
        (0.0123, "0.0123"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (1.2e-5, "1.2e-05"),
        (412, "412"),
    ):
        assert compact(value) == text


def test_text_of_others_is_neither_obeyed_nor_wrapped() -> None:
    hostile = "\x1b[2J[red]a\tb\nc\u202e👩‍👧 实验"
    text = PLAIN.safe(hostile)
    assert text == r"\x1b[2J[red]a b\nc\u202e\U0001f469\u200d\U0001f467 实验"
    assert Text(text).cell_len == len(text) + 2
    assert ASCII.safe("é实") == "??"


def test_keys_are_told_apart_however_they_arrive() -> None:
    assert parse_keys(b"\x1b[B\x1bOAxq") == ["down", "up", "leave"]
    assert parse_keys(b"\x1b[6~\x1b[1;5C\x1b[5~") == ["down", "up"]
    assert parse_keys(b"\x1b") == []
