from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal.events
from shoal.events import FLUSH_LINES, FLUSH_SECONDS, Events, StepEvent, read, steps


def event(step: int = 1, *, loss: float = 0.5, time: float = 1000.0, name: str = "step") -> StepEvent:
    return StepEvent(
        name,
        step,
        first=64 * step,
        size=64,
        share=(64 * step, 64 * step + 32),
        loss=loss,
        norm=2.0,
        wait=1e-5,
        forward=2e-5,
        backward=3e-5,
        update=4e-5,
        time=time,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events" / "rank-0.jsonl"


def test_a_step_reads_back(path: Path) -> None:
    events = Events(path)
    events.step(event(3, name='the "generator"', time=1234.5))
    events.close()
    assert list(read(path)) == [
        {
            "event": "step",
            "t": 1234.5,
            "name": 'the "generator"',
            "step": 3,
            "first": 192,
            "size": 64,
            "share": [192, 224],
            "loss": 0.5,
            "norm": 2.0,
            "wait": 1e-5,
            "forward": 2e-5,
            "backward": 3e-5,
            "update": 4e-5,
        }
    ]


@pytest.mark.parametrize("loss", [0.1 + 0.2, 1e-300, 1e22, 123456789.123456789])
def test_losses_keep_every_digit(path: Path, loss: float) -> None:
    events = Events(path)
    events.step(event(loss=loss))
    events.close()
    assert next(read(path))["loss"] == loss


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_word_for_is_null(path: Path, value: float) -> None:
    events = Events(path)
    events.step(event(loss=value))
    events.write("other", {"value": value, "nested": {"list": [value, 1.5, "NaN"]}})
    events.close()
    lines = path.read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert strict[0]["loss"] is None
    assert strict[1]["value"] is None
    assert strict[1]["nested"] == {"list": [None, 1.5, "NaN"]}


def test_steps_are_written_in_blocks_and_before_what_follows_them(path: Path) -> None:
    events = Events(path)
    now = events._flushed
    for step in range(FLUSH_LINES - 1):
        events.step(event(step, time=now))
    assert path.stat().st_size == 0
    events.step(event(FLUSH_LINES - 1, time=now))
    assert len(list(read(path))) == FLUSH_LINES
    events.step(event(FLUSH_LINES, time=now))
    events.write("save", {"step": FLUSH_LINES})
    assert [line["event"] for line in read(path)][-2:] == ["step", "save"]
    events.close()


def test_a_slow_run_is_written_soon(path: Path) -> None:
    events = Events(path)
    events.step(event(1, time=events._flushed + FLUSH_SECONDS + 1))
    assert len(list(read(path))) == 1
    events.close()


def test_the_next_attempt_appends_after_a_line_that_was_cut(path: Path) -> None:
    first = Events(path)
    first.step(event(1))
    first.step(event(2))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    second = Events(path)
    second.step(event(2))
    second.close()
    second.close()
    assert [line["step"] for line in read(path)] == [1, 2]


def test_readers_skip_what_is_no_event(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'[1]\n"event"\n\xff\xfe\n{"event": "start"}\n{"no": 1}\n\n{"event": "st')
    assert list(read(path)) == [{"event": "start"}]


def test_the_steps_of_a_run_are_read_from_its_directory_or_its_events(path: Path) -> None:
    events = Events(path)
    events.write("start", {"began": 1.0})
    events.step(event(3))
    events.close()
    run = path.parent.parent
    found = steps(run)
    assert found[("step", 3)][0] == list(read(str(path)))[1]
    assert all(steps(each) == found for each in (str(run), run / "events", str(run / "events")))


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
        events.step(event(1))
        events.flush()  # which warns no more
    assert [each["event"] for each in read(path)] == ["first"]
    events.write("third", {})
    events.close()
    assert [each["event"] for each in read(path)] == ["first", "second", "step", "third"]


def test_what_a_full_disk_never_took_is_said_to_be_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shoal.events, "KEPT_BYTES", 50)
    events = Events(path)
    with full(path, 0):
        with pytest.warns(UserWarning, match="kept in memory"):
            events.write("first", {"text": "." * 60})
        events.write("second", {})  # beyond the bound
        with pytest.warns(UserWarning, match=r"\d+ bytes of events for .* are lost"):
            events.close()
    assert path.read_bytes() == b""
