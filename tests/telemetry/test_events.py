"""Events: what is written reads back, in blocks, after cuts and on full disks."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal.telemetry.events
from shoal.telemetry.events import FLUSH_SECONDS, FLUSH_STEPS, Events, read_events, steps_by_rank
from shoal.telemetry.step_timer import Spent

NOTHING: Spent = (0,) * 10


def record(
    events: Events,
    step: int = 1,
    *,
    loss: float = 0.5,
    time: float = 1000.0,
    name: str = "step",
    spent: Spent = NOTHING,
    load: float = 0.0,
) -> None:
    share = (64 * step, 64 * step + 32)
    events.step(name, (step, 64 * step, 64, share, time, spent, loss, 2.0, 64.0, load))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events" / "rank-0.jsonl"


def test_a_step_reads_back(path: Path) -> None:
    events = Events(path)
    events.begin((10**9, 5, *NOTHING[2:]))
    spent = (10**9 + 100_000, 10_005, 10_000, 0, 20_000, 30_000, 0, 30_000, 0, 0)
    record(events, 3, name='the "generator"', time=1234.5, spent=spent, load=0.0123)
    events.close()
    assert list(read_events(path)) == [
        {
            "event": "step",
            "t": 1234.5,
            "name": 'the "generator"',
            "step": 3,
            "first": 192,
            "size": 64,
            "share": [192, 224],
            "counted": 64.0,
            "loss": 0.5,
            "norm": 2.0,
            "wall": 1e-4,
            "wait": 1e-5,
            "transfer": 0.0,
            "forward": 2e-5,
            "backward": 3e-5,
            "communication": 0.0,
            "update": 3e-5,
            "checkpoint": 0.0,
            "evaluation": 0.0,
            "load": 0.0123,
        }
    ]


def test_a_block_holds_columns_of_one_step_and_leaves_out_what_is_zero(path: Path) -> None:
    """Times are those since the step before, also where a block ended in between."""
    events = Events(path)
    for step, micros in enumerate((0, 70, 90, 190)):
        spent = (1000 * micros, 0, *(500 * micros,) * 2, *NOTHING[4:])
        record(events, step, time=1e-6 * micros, spent=spent)
        record(events, 9 + step, name="other", time=1e-6 * micros, spent=(1000 * micros, *NOTHING[1:]))
        if step == 1:
            events.flush()
    events.close()
    first, _, block, other = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["wait"] == first["transfer"] == [0, 35]
    assert (block["event"], block["name"], block["step"]) == ("steps", "step", [2, 3])
    assert (block["t"], block["at"], block["wall"]) == (0.00019, [100, 0], [20, 100])
    assert block["wait"] == block["transfer"] == [10, 50]
    assert block["share"] == [[128, 160], [192, 224]]
    assert "forward" not in block
    assert block["load"] == [0, 0]
    assert (other["name"], other["step"], other["wall"]) == ("other", [11, 12], [0, 0])
    times = [(each["step"], each["t"]) for each in read_events(path) if each["name"] == "step"]
    assert times == [(0, 0.0), (1, 7e-5), (2, 9e-5), (3, 0.00019)]


def test_steps_whose_writing_is_interrupted_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events(path)
    record(events, 1)
    whole = Events._hand_over

    def interrupted(events: Events, lines: bytes) -> None:
        whole(events, lines)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Events, "_hand_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            events.flush()
    record(events, 2)
    events.close()
    assert [each["step"] for each in read_events(path)] == [1, 2]


def test_numbers_keep_every_digit_and_what_json_has_no_word_for_is_null(path: Path) -> None:
    events = Events(path)
    losses = (0.1 + 0.2, 1e-300, 1e22, 123456789.123456789)
    for loss in losses:
        record(events, loss=loss)
    events.write("between", {})
    assert tuple(each["loss"] for each in read_events(path) if each["event"] == "step") == losses
    for value in (math.nan, math.inf, -math.inf):
        record(events, loss=value)
        events.write("other", {"value": value, "nested": {"list": [value, 1.5, "NaN"]}})
    events.close()
    lines = path.read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines][2:]
    assert [each["loss"] for each in strict[::2]] == [[None]] * 3
    assert [each["value"] for each in strict[1::2]] == [None] * 3
    assert [each["nested"] for each in strict[1::2]] == [{"list": [None, 1.5, "NaN"]}] * 3


def test_steps_are_written_in_blocks_and_before_what_follows_them(path: Path) -> None:
    events = Events(path)
    now = events._flushed
    for step in range(FLUSH_STEPS - 1):
        record(events, step, time=now)
    assert path.stat().st_size == 0
    record(events, FLUSH_STEPS - 1, time=now)
    assert len(list(read_events(path))) == FLUSH_STEPS
    record(events, FLUSH_STEPS, time=now)
    events.write("save", {"step": FLUSH_STEPS})
    assert [line["event"] for line in read_events(path)][-2:] == ["step", "save"]
    record(events, FLUSH_STEPS + 1, time=events._flushed + FLUSH_SECONDS + 1)  # of a slow run
    assert [line["event"] for line in read_events(path)][-2:] == ["save", "step"]
    events.close()


def test_the_next_attempt_appends_after_a_line_that_was_cut(path: Path) -> None:
    first = Events(path)
    record(first, 1)
    first.flush()
    record(first, 2)
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    second = Events(path)
    record(second, 3)
    second.close()
    second.close()
    assert [line["step"] for line in read_events(path)] == [1, 3]


def test_readers_skip_what_is_no_event(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'[1]\n"event"\n\xff\xfe\n{"event": "start"}\n{"no": 1}\n\n{"event": "st')
    assert list(read_events(path)) == [{"event": "start"}]


def test_the_steps_of_a_run_are_read_from_its_directory_or_its_events(path: Path) -> None:
    events = Events(path)
    events.write("start", {"began": 1.0})
    record(events, 3)
    events.close()
    run = path.parent.parent
    found = steps_by_rank(run)
    assert found[("step", 3)][0] == list(read_events(str(path)))[1]
    assert all(steps_by_rank(each) == found for each in (str(run), run / "events", str(run / "events")))


@contextmanager
def full(path: Path, room: int) -> Iterator[None]:
    """No file grows beyond `room` more bytes than this one has: the system takes a part, then none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("error")
def test_a_disk_that_is_full_for_a_while_loses_nothing(path: Path) -> None:
    events = Events(path)
    events.write("first", {})
    with full(path, 10):
        with pytest.warns(UserWarning, match="kept in memory.*rank-0.jsonl"):
            events.write("second", {})
        record(events, 1)
        events.flush()  # which warns no more
    assert [each["event"] for each in read_events(path)] == ["first"]
    events.write("third", {})
    events.close()
    assert [each["event"] for each in read_events(path)] == ["first", "second", "step", "third"]


def test_what_a_full_disk_never_took_is_said_to_be_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.telemetry.events, "KEPT_BYTES", 50)
    events = Events(path)
    with full(path, 0):
        with pytest.warns(UserWarning, match="kept in memory"):
            events.write("first", {"text": "." * 60})
        events.write("second", {})  # beyond the bound
        with pytest.warns(UserWarning, match=r"\d+ bytes of events for .* are lost"):
            events.close()
    assert path.read_bytes() == b""
