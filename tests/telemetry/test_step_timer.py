"""Where time goes: parts that are disjoint and add up, by the clock of the host or of a device."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.clocks import ManualClock
from shoal.telemetry.step_timer import (
    AT,
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    FORWARD,
    OTHER,
    PARTS,
    UNRESOLVED,
    UPDATE,
    WAIT,
    DeviceTimeline,
    Spent,
    TickTimes,
    Timeline,
    columns,
    timeline_of,
)

NOTHING: Spent = (0,) * (1 + len(PARTS))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def parts(spent: Spent) -> dict[str, int]:
    """What is not nothing, by name."""
    return {name: each for name, each in zip(PARTS, spent[1:], strict=True) if each}


def test_time_belongs_to_what_was_entered_last(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    timeline.begin()
    for part, lasts in ((WAIT, 3), (FORWARD, 5), (BACKWARD, 7), (OTHER, 2)):
        timeline.enter(part)
        clock.nanoseconds += lasts
    assert timeline.enter(BACKWARD) == OTHER
    clock.nanoseconds += 1
    with timeline.within(COMMUNICATION):
        clock.nanoseconds += 11
    clock.nanoseconds += 100
    timeline.enter(OTHER)
    spent = timeline.take()
    assert parts(spent) == {
        "wait": 3,
        "forward": 5,
        "backward": 108,
        "communication": 11,
        "other": 2,
    }
    assert spent[AT] == clock.nanoseconds == sum(spent[1:])


def test_what_is_marked_during_a_save_or_an_evaluation_is_part_of_it(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    timeline.begin()
    timeline.enter(UPDATE)
    with timeline.during(EVALUATION):
        before = timeline.enter(WAIT)
        clock.nanoseconds += 5
        with timeline.during(CHECKPOINT):
            clock.nanoseconds += 5
        timeline.enter(before)
        clock.nanoseconds += 5
    clock.nanoseconds += 1
    assert timeline.enter(OTHER) == UPDATE
    assert parts(timeline.take()) == {"evaluation": 15, "update": 1}


def test_an_error_leaves_a_part(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    timeline.begin()
    with pytest.raises(ValueError, match="oh"), timeline.during(CHECKPOINT):
        raise ValueError("oh")
    timeline.enter(WAIT)
    clock.nanoseconds += 5
    timeline.enter(OTHER)
    assert parts(timeline.take()) == {"wait": 5}


def test_time_before_the_first_batch_belongs_to_no_step(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    clock.nanoseconds += 5  # no batch has been asked for
    timeline.begin()
    timeline.enter(WAIT)
    clock.nanoseconds += 5
    timeline.begin()  # another epoch
    timeline.enter(OTHER)
    assert parts(timeline.take()) == {"wait": 5}
    before = timeline.pause()
    timeline.enter(FORWARD)
    clock.nanoseconds += 5
    timeline.begin()
    clock.nanoseconds += 2
    timeline.enter(OTHER)
    spent = timeline.take()
    assert [now - was for now, was in zip(spent, before, strict=True)][1:].count(0) == len(PARTS) - 1
    assert parts(spent) == {"wait": 5, "forward": 2}


def test_without_a_loader_time_goes_on_from_the_pause(clock: ManualClock) -> None:
    timeline = Timeline(clock)
    before = timeline.pause()
    clock.nanoseconds += 5
    timeline.enter(OTHER)
    assert sum(timeline.take()[1:]) - sum(before[1:]) == 5
    timeline.begin()
    assert sum(timeline.take()[1:]) - sum(before[1:]) == 5


def test_columns_are_microseconds_that_do_not_add_up_rounding() -> None:
    rows = [(1000 + 1700 * step, 0, 1700 * step, *NOTHING[3:]) for step in range(1, 1001)]
    found = {name: column.tolist() for name, column in columns([(1000, *NOTHING[1:]), *rows]).items()}
    assert set(found) == {"at", "wall", "wait"}
    assert found["wall"] == found["wait"]
    assert sum(found["wait"]) == 1700
    assert set(found["wait"]) == {1, 2}
    assert found["at"][-1] == 0
    assert all(late - early in (1, 2) for late, early in pairwise(found["at"]))


def test_the_first_step_of_a_tick_is_charged_with_all_that_is_nobodys_own() -> None:
    begun = (100, 10, *NOTHING[2:])
    division = TickTimes(begun)
    spent = (200, 20, 30, 0, 50, 0, 0, 0, 0, 0)
    own = {"judge": {FORWARD: 20}, "maker": {FORWARD: 29}}
    charged = division.charge(spent, own)
    assert charged["maker"] == (200, 10, 0, 0, 29, 0, 0, 0, 0, 0)
    assert charged["judge"] == (200, 20, 30, 0, 21, 0, 0, 0, 0, 0)
    later = (300, 25, 40, 0, 60, 0, 0, 0, 0, 0)
    assert division.charge(later, {}) == {}  # a tick without a step: the next has its time
    (alone,) = division.charge(later, {"maker": {FORWARD: 5}}).values()
    assert alone == (300, 15, 10, 0, 39, 0, 0, 0, 0, 0)


class Queue:
    """A device that works through what is queued when it is told to, and its events."""

    def __init__(self) -> None:
        self.clock = 0.0  # of all that is queued, when it will be done
        self.done = 0.0
        self.made = 0
        self.queries = 0

    def event(self) -> QueuedEvent:
        self.made += 1
        return QueuedEvent(self)


class QueuedEvent:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.at = -1.0

    def record(self) -> None:
        self.at = self.queue.clock

    def query(self) -> bool:
        self.queue.queries += 1
        return self.at <= self.queue.done

    def elapsed_time(self, end: QueuedEvent, /) -> float:
        assert max(self.at, end.at) <= self.queue.done
        return end.at - self.at


def test_on_a_device_time_is_known_once_it_has_come_there() -> None:
    """What is not done yet counts later; events are used again."""
    queue = Queue()
    timeline = DeviceTimeline(queue.event)
    timeline.begin()
    taken = []
    for _ in range(50):
        for part, milliseconds in ((WAIT, 0.25), (FORWARD, 1.0), (BACKWARD, 2.0), (UPDATE, 0.5)):
            timeline.enter(part)
            queue.clock += milliseconds
            if part == BACKWARD:
                queue.done = queue.clock  # the loss is fetched
        timeline.enter(OTHER)
        taken.append(timeline.take())
    assert parts(taken[0]) == {"wait": 250_000, "forward": 1_000_000, "backward": 2_000_000}
    steps = [[now - was for now, was in zip(b, a, strict=True)][1:] for a, b in pairwise(taken)]
    assert all(sum(step) == 3_750_000 for step in steps)
    assert steps[0][UPDATE - 1] == 500_000
    assert queue.made < 20
    timeline.enter(OTHER)
    queue.done = queue.clock
    assert sum(timeline.take()[1:]) == round(queue.clock * 1e6)


def test_a_device_is_marked_during_a_save_and_from_a_pause_on() -> None:
    queue = Queue()
    timeline = DeviceTimeline(queue.event)
    timeline.begin()
    with timeline.during(CHECKPOINT):
        queue.clock += 1.0
        timeline.enter(WAIT)
        queue.clock += 1.0
    queue.done = queue.clock
    assert parts(timeline.take()) == {"checkpoint": 2_000_000}
    timeline.pause()
    queue.clock += 5.0
    timeline.begin()
    queue.clock += 3.0
    timeline.enter(OTHER)
    queue.done = queue.clock
    assert parts(timeline.take()) == {"checkpoint": 2_000_000, "other": 3_000_000}


def test_a_loop_that_never_ticks_keeps_few_events() -> None:
    queue = Queue()
    timeline = DeviceTimeline(queue.event)
    for _ in range(10 * UNRESOLVED):
        timeline.enter(FORWARD)
        queue.clock += 1.0
        queue.done = queue.clock
    assert queue.made <= UNRESOLVED + 2


def test_marks_query_nothing_in_a_step_of_80_fsdp_modules_and_little_on_a_device_far_behind() -> None:
    queue = Queue()
    timeline = DeviceTimeline(queue.event)
    for _ in range(80 * 12):
        timeline.enter(FORWARD)
    assert queue.queries == 0
    behind = Queue()
    timeline = DeviceTimeline(behind.event)
    behind.clock = 1.0
    for _ in range(UNRESOLVED + 100):
        timeline.enter(FORWARD)
    assert behind.queries <= 100 * 2 * UNRESOLVED.bit_length()


def test_the_clock_goes_by_the_device() -> None:
    assert type(timeline_of(torch.device("cpu"))) is Timeline
