"""A timeline of steps without a profiler record, from the parts of each step in the events.

It is coarse: the events have the length of each part of a step but not its position, so the parts are
drawn one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shoal.telemetry.events import paths_in, read_events
from shoal.telemetry.profiler.window import FOLDER, Window
from shoal.telemetry.step_timer import PARTS
from shoal.tools.report.trace.merge import (
    STEPS_TRACK,
    Event,
    metadata_event,
    rank_track_names,
    write_trace,
)
from shoal.util.errors import CheckpointError

PARTS_TRACK = 1


class StepSpan(NamedTuple):
    """One step of one rank: its end by the rank's clock, and its parts, in seconds."""

    end: float
    wall: float
    parts: Mapping[str, float]


class RankSteps(NamedTuple):
    """The steps of a rank, each from its newest attempt, in the rank's events.

    `at` is the step at which it last started. `over` is True if the rank has recorded that it ended.
    """

    host: str
    steps: dict[int, StepSpan]
    at: int
    over: bool


def read_rank_steps(run: Path) -> dict[int, RankSteps]:
    """Return the steps in a run's events, by rank; several Steps in one tick are combined."""
    return {rank: _rank(path) for rank, path in paths_in(run).items()}


def write_coarse_trace(run: str | Path, first: int, last: int) -> Path:
    """Draw these steps from the events, and return the file. Raises CheckpointError without any.

    Clocks are aligned by the ends of steps, at which ranks have just waited for each other.
    """
    ranks = read_rank_steps(Path(run))
    window = Window(first, last)
    inside = {rank: _inside(one, window) for rank, one in ranks.items()}
    ends = {rank: steps for rank, steps in inside.items() if steps}
    if not ends:
        raise CheckpointError(
            given=f"a timeline of steps {window} in {run}",
            found=f"no such steps in its events; the run is at step {current_step(ranks)[0]:,}",
            fix=f"run shoal report {run} --trace A:B with steps that have been taken",
        )
    return write_trace(Path(run) / FOLDER, window, _events(ranks, ends))


def current_step(ranks: Mapping[int, RankSteps]) -> tuple[int, bool]:
    """Return the current step of the run, 0 before the first, and whether the run has ended.

    The lowest rank decides: other ranks may have files only of an earlier attempt with more ranks.
    """
    return next(((rank.at, rank.over) for rank in ranks.values()), (0, False))


def _inside(rank: RankSteps, window: Window) -> dict[int, StepSpan]:
    return {n: taken for n, taken in rank.steps.items() if window.first <= n <= window.last}


def _events(
    ranks: Mapping[int, RankSteps], inside: Mapping[int, Mapping[int, StepSpan]]
) -> Iterator[Event]:
    reference = next(iter(inside.values()))
    late = {rank: _late(steps, reference) for rank, steps in inside.items()}
    begin = min(
        taken.end - taken.wall - late[rank]
        for rank, steps in inside.items()
        for taken in steps.values()
    )
    for rank, steps in inside.items():
        zero = begin + late[rank]
        yield from rank_track_names(rank, ranks[rank].host)
        yield metadata_event("thread_name", rank, PARTS_TRACK, name="parts, order unknown")
        last = 0.0
        for number, taken in steps.items():
            at, end = taken.end - taken.wall - zero, taken.end - zero
            if at < last < end:  # times are rounded, and viewers draw overlaps wrongly
                at = last
            last = end
            yield _range(f"step {number}", rank, STEPS_TRACK, at, end)
            for part, seconds in taken.parts.items():
                until = min(at + seconds, end)
                yield _range(part, rank, PARTS_TRACK, at, until)
                at = until


def _late(steps: Mapping[int, StepSpan], reference: Mapping[int, StepSpan]) -> float:
    found = [taken.end - reference[n].end for n, taken in steps.items() if n in reference]
    return median(found) if found else 0.0


def _range(name: str, rank: int, track: int, begin: float, end: float) -> Event:
    at, until = round(begin * 1e6, 3), round(end * 1e6, 3)
    times = {"ts": at, "dur": round(until - at, 3)}
    return {"ph": "X", "cat": "shoal", "name": name, "pid": rank, "tid": track} | times


def _rank(path: Path) -> RankSteps:
    host, steps, at, over = "", dict[int, StepSpan](), 0, False
    for event in read_events(path):
        if event["event"] == "start":
            host, over = str(event.get("host", host)), False
            at = event["step"] if type(event.get("step")) is int else 0
        elif event["event"] == "end":
            over = True
        elif event["event"] == "step":
            taken = _taken(event)
            # Of several Steps in a tick, only the first has the time.
            if taken is not None and taken.wall > 0:
                at = event["step"]
                steps[at] = taken
    return RankSteps(host, steps, at, over)


def _taken(event: Mapping[str, Any]) -> StepSpan | None:
    """Return the step of a line, or None if the line lacks the fields of a step."""
    parts = {part: event[part] for part in PARTS[1:] if event.get(part)}
    numbers = [event.get("t"), event.get("wall", 0.0), *parts.values()]
    # Viewers accept neither NaN nor negative times.
    if type(event.get("step")) is not int or not all(
        type(n) in (int, float) and 0 <= n < 1e15 for n in numbers
    ):
        return None
    # A block lacks what is zero in all of its steps.
    return StepSpan(event["t"], event.get("wall", sum(parts.values())), parts)
