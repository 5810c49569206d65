"""Timelines: clocks, windows, requests, and what Chrome and Perfetto are given to read."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from typer.testing import CliRunner

import shoal
from helpers.trace_format import checked_events, steps_of
from shoal.cli.main import app
from shoal.telemetry import clock_offset
from shoal.telemetry.clock_offset import ClockOffset, RoundTrip
from shoal.telemetry.profiler import window
from shoal.telemetry.profiler.window import Requests, Window
from shoal.telemetry.step_timer import OTHER, UPDATE
from shoal.tools.report import read_history
from shoal.tools.report.timeline import make_timeline, merge_traces, write_coarse_trace
from shoal.training.trace_recorder import Recorder
from shoal.util.errors import CheckpointError, StepError

SECOND = 10**9


def test_the_quickest_trip_decides_and_bounds_the_offset() -> None:
    # The other clock is 1,000 ahead; the way there takes 30 of the 40 of the quickest trip.
    trips = [RoundTrip(0, 1300, 400), RoundTrip(1000, 2030, 1040), RoundTrip(5000, 6010, 5100)]
    found = clock_offset.best_offset(trips)
    assert found == ClockOffset(1000, 1010, 20)
    assert abs(found.offset - 1000) <= found.uncertainty


def test_a_clock_that_runs_fast_is_followed() -> None:
    offsets = [ClockOffset(0, 100, 1), ClockOffset(1000, 90, 1)]
    assert [clock_offset.offset_at(offsets, time) for time in (0, 500, 1000, 2000)] == [100, 95, 90, 80]
    assert clock_offset.offset_at(offsets[:1], 10**6) == 100


def test_ranks_ask_rank_0_for_the_time() -> None:
    store, ahead = HashStore(), 7 * SECOND
    found: dict[int, ClockOffset | None] = {}
    time = threading.Lock()
    ticks = iter(range(0, 10**9, 1000))

    def clock(shift: int) -> int:
        with time:
            return next(ticks) + shift

    def run(rank: int) -> None:
        shift = ahead if rank else 0
        found[rank] = clock_offset.measure_offset(store, rank, 3, lambda: clock(shift))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert found[0].offset == 0
    for rank in (1, 2):
        offset = found[rank]
        assert offset is not None
        assert abs(offset.offset + ahead) <= offset.uncertainty < SECOND


def test_what_is_no_window_is_refused() -> None:
    for text in ("", "5", "7:5", "1:5", "-2:5", "a:b", "2:5:9", "2:5\n", "\u0662:\u0665"):
        with pytest.raises(StepError):
            window.parse_window(text, f"--trace {text}")


def test_a_window_is_read() -> None:
    assert window.parse_window("100:105", "") == Window(100, 105)


def make_requests(folder: Path, size: int) -> list[Requests]:
    store = HashStore() if size > 1 else None
    return [Requests(folder, store=store, rank=rank, size=size) for rank in range(size)]


def due(ranks: Sequence[Requests], step: int) -> list[Any]:
    """What all ranks do at a step; rank 0 first, since the others wait for it."""
    return [rank.due(step) for rank in ranks]


def test_ranks_that_all_saw_a_request_record_it_together(tmp_path: Path) -> None:
    ranks = make_requests(tmp_path / "traces", 3)
    window.write_request(tmp_path, Window(10, 12))
    for rank in ranks:
        rank.look()
        rank.look()
    assert due(ranks, 8) == [None] * 3
    assert due(ranks, 9) == [(Window(10, 12), True)] * 3
    assert due(ranks, 10) == [None] * 3
    assert window.read_request(tmp_path / "traces") is None
    window.write_request(tmp_path, Window(20, 20))
    for rank in ranks:
        rank.look()
    assert due(ranks, 19) == [(Window(20, 20), True)] * 3


def test_if_one_rank_saw_a_request_too_late_none_records(tmp_path: Path) -> None:
    ranks = make_requests(tmp_path / "traces", 2)
    window.write_request(tmp_path, Window(10, 12))
    ranks[1].look()  # before rank 0 has: it says nothing yet, and looks again
    ranks[0].look()
    assert due(ranks, 9) == [(Window(10, 12), False), None]
    ranks[1].look()
    assert due(ranks, 10) == [None, None]


def test_a_request_for_steps_that_are_over_is_dropped(tmp_path: Path) -> None:
    (rank,) = make_requests(tmp_path / "traces", 1)
    assert rank.due(50) is None
    window.write_request(tmp_path, Window(10, 12))
    rank.look()
    assert window.read_request(tmp_path / "traces") is None
    assert rank.due(51) is None


def test_a_request_in_the_place_of_one_that_was_seen_comes_after_it(tmp_path: Path) -> None:
    ranks = make_requests(tmp_path / "traces", 2)
    for wanted in (Window(10, 12), Window(20, 21)):
        window.write_request(tmp_path, wanted)
        for rank in ranks:
            rank.look()
    assert due(ranks, 9) == [(Window(10, 12), True)] * 2
    for rank in ranks:
        rank.look()
    assert due(ranks, 19) == [(Window(20, 21), True)] * 2
    assert window.read_request(tmp_path / "traces") is None


def test_a_request_for_more_than_memory_holds_is_refused(tmp_path: Path) -> None:
    write_events(tmp_path, 0, block(10.0, wait=[0] * 6))
    with pytest.raises(StepError, match="1,001 steps, and the maximum is 1,000"):
        make_timeline(str(tmp_path), "100:1100")
    with pytest.raises(StepError):
        window.check_length(Window(2, 10**15), "profile=(2, 10**15)")
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps({"name": "a", "first": 2, "last": 10**9}))
    assert window.read_request(folder) is None


def test_a_request_that_was_tampered_with_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    wish = {"name": "a/../b", "first": 2, "last": 3}
    for content in ("", "[]", "{", json.dumps(wish), json.dumps(wish | {"name": "a", "first": "2"})):
        (folder / "request.json").write_text(content)
        assert window.read_request(folder) is None


def record(
    folder: Path,
    rank: int,
    *,
    clock: int,
    profiler: float,
    offsets: list[ClockOffset],
    lasting: float = 9e5,
    late: tuple[float, float] = (0, 0),
) -> None:
    """A record of two steps that all ranks began at the times 1 s and 2 s, and of one operation.

    The rank's clock is `clock` ns ahead of that time, its profiler's `profiler` µs; it marked the steps
    `late` µs after it had noted their times.
    """
    here = {"pid": 7, "tid": 9}
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "before", "ts": 1e5 + profiler, "dur": 1, **here},
        {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1.5e6 + profiler, "dur": 5, **here},
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 4, "ts": 1.5e6 + profiler, **here},
        {"ph": "M", "name": "thread_name", "ts": 0, "args": {"name": "main"}, **here},
        {"ph": "i", "name": "Record Window End", "ts": 3e6, "pid": "", "tid": ""},
    ]
    events += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"shoal step {step}",
            "ts": (step - 4) * 1e6 + profiler + late[step - 5],
            "dur": lasting,
            **here,
        }
        for step in (5, 6)
    ]
    begins = [(5, SECOND + clock), (6, 2 * SECOND + clock)]
    own = {"format": 1, "rank": rank, "host": f"node{rank}", "begins": begins, "offsets": offsets}
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"rank-{rank}-5-6.json.gz", "wt") as file:
        json.dump({"traceEvents": events, "shoal": own}, file)


def test_records_become_one_timeline_by_rank_0s_clock(tmp_path: Path) -> None:
    ahead = 5 * SECOND
    record(tmp_path / "traces", 0, clock=0, profiler=1e9, offsets=[ClockOffset(0, 0, 0)])
    offsets = [ClockOffset(ahead, -ahead, 40_000), ClockOffset(ahead + SECOND, -ahead, 60_000)]
    record(tmp_path / "traces", 1, clock=ahead, profiler=-3e7, offsets=offsets)
    events = checked_events(merge_traces(tmp_path, 5, 6))
    begins = {rank: steps_of(events, rank) for rank in (0, 1)}
    assert begins[0] == pytest.approx({5: 1e5, 6: 1.1e6})
    assert begins[1] == pytest.approx(begins[0])
    names = {each["pid"]: each["args"] for each in events if each["name"] == "process_name"}
    assert names == {0: {"name": "rank 0 on node0"}, 1: {"name": "rank 1 on node1"}}
    labels = [each["args"]["labels"] for each in events if each["name"] == "process_labels"]
    assert labels[1] == "clock within 60 µs of rank 0's"
    products = [each for each in events if each["name"] == "mm"]
    assert [(each["pid"], each["ts"]) for each in products] == [(0, 6e5), (1, 6e5)]
    arrows = [each["id"] for each in events if each["ph"] == "s"]
    assert len(set(arrows)) == 2
    assert not any(each["name"] in ("before", "Record Window End") for each in events)


@pytest.mark.parametrize("drift", [0, -7, 1234, 50_001])
def test_steps_that_follow_each_other_do_so_by_another_clock(drift: int, tmp_path: Path) -> None:
    """The drift in nanoseconds a second; ranges of one line lie within each other or apart."""
    record(
        tmp_path / "traces", 0, clock=0, profiler=0.0004, offsets=[ClockOffset(0, 0, 0)], lasting=1e6
    )
    offsets = [ClockOffset(SECOND, 333, 0), ClockOffset(2 * SECOND, 333 + drift, 0)]
    record(tmp_path / "traces", 1, clock=0, profiler=0.1257, offsets=offsets, lasting=1e6)
    events = checked_events(merge_traces(tmp_path, 5, 6))
    for rank in (0, 1):
        first, second = (
            each for each in events if each["pid"] == rank and each["name"] in ("step 5", "step 6")
        )
        assert first["ts"] + first["dur"] == pytest.approx(second["ts"], rel=0, abs=1e-6)


def test_a_rank_that_had_to_wait_while_it_marked_a_step_keeps_both(tmp_path: Path) -> None:
    for late in ((0, 3000), (3000, 0), (40, 50)):
        record(tmp_path / "traces", 0, clock=0, profiler=7, offsets=[ClockOffset(0, 0, 0)], late=late)
        begins = steps_of(checked_events(merge_traces(tmp_path, 5, 6)), 0)
        least = min(late)
        assert begins == pytest.approx({5: 1e5 + late[0] - least, 6: 1.1e6 + late[1] - least})


def test_a_clock_that_nobody_compared_is_set_by_the_steps(tmp_path: Path) -> None:
    record(tmp_path / "traces", 0, clock=0, profiler=0, offsets=[ClockOffset(0, 0, 0)])
    record(tmp_path / "traces", 1, clock=9 * SECOND, profiler=0, offsets=[])
    events = checked_events(merge_traces(tmp_path, 5, 6))
    assert steps_of(events, 1) == pytest.approx(steps_of(events, 0))
    (label,) = [e["args"]["labels"] for e in events if e["name"] == "process_labels" and e["pid"] == 1]
    assert label.startswith("clock unknown")


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "rank-0-5-6.json.gz"
    for content in (b"", b"{}", b"no gzip", b'{"shoal": {"format": 99}}'):
        path.write_bytes(content if content == b"no gzip" else gzip.compress(content))
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            merge_traces(tmp_path, 5, 6)


@pytest.mark.full
def test_what_a_record_takes_is_not_the_optimizers(world: shoal.World, tmp_path: Path) -> None:
    parts = []

    def clock() -> int:
        parts.append(world.timeline._part)
        return time.perf_counter_ns()

    recorder = Recorder(world, tmp_path, Window(2, 2), clock=clock)
    with world.timeline.within(UPDATE):
        recorder.tick(1)
        recorder.tick(2)
    assert parts == [OTHER, UPDATE, OTHER]
    assert merge_traces(tmp_path, 2, 2).is_file()


def write_events(run: Path, rank: int, *lines: Mapping[str, Any]) -> None:
    (run / "events").mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "events" / f"rank-{rank}.jsonl").write_text(text + '{"event": "steps", "t": 1')


def block(end: float, **columns: list[int]) -> dict[str, Any]:
    count = len(columns["wait"])
    return {
        "event": "steps",
        "t": end,
        "name": "step",
        "step": list(range(5, 5 + count)),
        "at": [100_000 * n for n in reversed(range(count))],
        "wall": [90_000] * count,
        "load": [0] * count,
        **columns,
    }


def coarse(run: Path, first: int, last: int) -> list[dict[str, Any]]:
    return checked_events(write_coarse_trace(read_history(run), Window(first, last)))


def test_steps_that_nobody_recorded_are_drawn_from_their_parts(tmp_path: Path) -> None:
    late = 3.0  # the second rank's wall clock
    start = {"event": "start", "t": 0.0, "host": "node1"}
    write_events(tmp_path, 0, block(10.0, wait=[10_000, 0], forward=[30_000, 30_000]))
    write_events(tmp_path, 1, start, block(10.0 + late, wait=[0, 0], forward=[80_000, 80_000]))
    events = coarse(tmp_path, 5, 6)
    assert steps_of(events, 0) == pytest.approx({5: 0.0, 6: 1e5}, abs=1.0)
    assert steps_of(events, 1) == pytest.approx(steps_of(events, 0), abs=1.0)
    drawn = [(e["pid"], e["name"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert drawn[:3] == [(0, "wait", 1e4), (0, "forward", 3e4), (0, "forward", 3e4)]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1 on node1"]


def test_steps_that_are_rounded_into_each_other_are_drawn_side_by_side(tmp_path: Path) -> None:
    ends = {"at": [200_000, 100_000, 0], "wall": [100_003] * 3, "forward": [100_004] * 3}
    write_events(tmp_path, 0, block(10.0, wait=[0] * 3) | ends)
    assert steps_of(coarse(tmp_path, 5, 7), 0).keys() == {5, 6, 7}


def test_a_run_is_asked_for_steps_that_are_ahead_of_it(tmp_path: Path) -> None:
    write_events(tmp_path, 0, block(10.0, wait=[0] * 6))
    assert "the run is at step 10; requested a record of steps 20:25." in make_timeline(
        str(tmp_path), "20:25"
    )
    assert window.read_request(tmp_path / "traces") is not None
    assert "coarse" in make_timeline(str(tmp_path), "6:7")
    record(tmp_path / "traces", 0, clock=0, profiler=0, offsets=[ClockOffset(0, 0, 0)])
    assert "of 1 rank" in make_timeline(str(tmp_path), "5:6")
    with pytest.raises(CheckpointError, match="no such steps"):
        coarse(tmp_path, 30, 40)
    with pytest.raises(CheckpointError, match="is not a run directory"):
        make_timeline(str(tmp_path / "events"), "5:6")


def test_a_run_that_has_ended_is_asked_for_nothing(tmp_path: Path) -> None:
    end = {"event": "end", "t": 11.0, "step": 10, "reason": "closed"}
    write_events(tmp_path, 0, block(10.0, wait=[0] * 6), end)
    with pytest.raises(CheckpointError, match="the run has ended, and its last step is 10"):
        make_timeline(str(tmp_path), "20:25")
    assert window.read_request(tmp_path / "traces") is None
    assert "steps 9:25 up to 10, coarse" in make_timeline(str(tmp_path), "9:25")


def test_a_run_that_went_back_is_asked_for_steps_that_it_takes_again(tmp_path: Path) -> None:
    start = {"event": "start", "t": 11.0, "step": 7}
    end = {"event": "end", "t": 11.0, "step": 10, "reason": "closed"}
    write_events(tmp_path, 0, block(10.0, wait=[0] * 6), end, start)
    write_events(tmp_path, 1, block(10.0, wait=[0] * 6), end)  # of a start on more ranks
    assert "the run is at step 7; requested a record of steps 9:10." in make_timeline(
        str(tmp_path), "9:10"
    )


def test_no_time_in_a_coarse_timeline_is_below_zero_or_none(tmp_path: Path) -> None:
    early = block(10.0, wait=[10_000] * 2) | {"wall": [90_000] * 2}
    earlier = block(10.0, wait=[10_000] * 2) | {"wall": [99_000] * 2}
    broken = early | {"t": 1e300}
    write_events(tmp_path, 0, early, broken)
    write_events(tmp_path, 1, earlier | {"forward": [-1, float("nan")]}, broken)
    events = coarse(tmp_path, 5, 7)
    assert steps_of(events, 0).keys() == steps_of(events, 1).keys() == {5, 6}


def test_the_command_makes_a_timeline(tmp_path: Path) -> None:
    write_events(tmp_path, 0, block(10.0, wait=[0] * 6))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--trace", "6:7"])
    assert done.exit_code == 0
    path = tmp_path / "traces" / "steps-6-7.json.gz"
    assert done.output.startswith(f"{path}: steps 6:7, coarse")
    assert steps_of(checked_events(path), 0).keys() == {6, 7}
