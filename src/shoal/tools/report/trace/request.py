"""`shoal report RUN --trace a:b`: merge records, request one, or draw a timeline from the events.

A timeline from the events is coarse: they have the length of each part of a step but not its position,
so the parts are drawn one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from shoal.telemetry.profiler.window import (
    FOLDER,
    MOST,
    Window,
    check_length,
    parse_window,
    trace_path,
    write_request,
)
from shoal.tools.report import PARTS, History, read_history
from shoal.tools.report.attempts import outcome_of
from shoal.tools.report.trace.merge import (
    STEPS_TRACK,
    Event,
    merge_traces,
    metadata_event,
    rank_track_names,
    write_trace,
)
from shoal.util.errors import CheckpointError, raised_as

PARTS_TRACK = 1

Spans = Mapping[int, tuple[float, ...]]
"""The steps of a rank by number: the end by the rank's clock, the wall time, and PARTS, in seconds."""


def write_coarse_trace(history: History, window: Window) -> Path:
    """Draw these steps from the events, and return the file. Raises CheckpointError without any.

    Clocks are aligned by the ends of steps, at which ranks have just waited for each other.
    """
    run = history.directory
    hosts = {rank: each.host(rank) or "" for each in history.attempts for rank in each.ranks}
    spans = {rank: found for rank in sorted(hosts) if (found := _spans(history, rank, window))}
    if not spans:
        at = history.latest.last if history.latest is not None else 0
        raise CheckpointError(
            given=f"a timeline of steps {window} in {run}",
            found=f"no such steps in its events; the run is at step {at:,}",
            fix=f"run shoal report {run} --trace A:B with steps that have been taken",
        )
    return write_trace(run / FOLDER, window, _events(hosts, spans))


def _spans(history: History, rank: int, window: Window) -> Spans:
    """Return the steps of a rank in a window, each as its newest attempt recorded it."""
    found: dict[int, tuple[float, ...]] = {}
    for attempt in history.attempts:
        rows = attempt.ticks(rank)
        inside = (rows["step"] >= window.first) & (rows["step"] <= window.last) & (rows["wall"] > 0)
        rows = rows[inside & (np.abs(rows["time"]) < 1e15)]
        # Whole microseconds again, which float32 holds up to its rounding.
        columns = [rows[name].astype(float).round(6).tolist() for name in ("time", "wall", *PARTS)]
        found |= zip(rows["step"].tolist(), zip(*columns, strict=True), strict=True)
    return found


def _events(hosts: Mapping[int, str], spans: Mapping[int, Spans]) -> Iterator[Event]:
    reference = next(iter(spans.values()))
    late = {rank: _late(steps, reference) for rank, steps in spans.items()}
    begin = min(
        end - wall - late[rank] for rank, steps in spans.items() for end, wall, *_ in steps.values()
    )
    for rank, steps in spans.items():
        zero = begin + late[rank]
        yield from rank_track_names(rank, hosts[rank])
        yield metadata_event("thread_name", rank, PARTS_TRACK, name="parts, order unknown")
        last = 0.0
        for number, (ended, wall, *parts) in steps.items():
            at, end = ended - wall - zero, ended - zero
            if at < last < end:  # times are rounded, and viewers draw overlaps wrongly
                at = last
            last = end
            yield _range(f"step {number}", rank, STEPS_TRACK, at, end)
            for part, seconds in zip(PARTS, parts, strict=True):
                if seconds:
                    until = min(at + seconds, end)
                    yield _range(part, rank, PARTS_TRACK, at, until)
                    at = until


def _late(steps: Spans, reference: Spans) -> float:
    found = [end - reference[number][0] for number, (end, *_) in steps.items() if number in reference]
    return median(found) if found else 0.0


def _range(name: str, rank: int, track: int, begin: float, end: float) -> Event:
    at, until = round(begin * 1e6, 3), round(end * 1e6, 3)
    times = {"ts": at, "dur": round(until - at, 3)}
    return {"ph": "X", "cat": "shoal", "name": name, "pid": rank, "tid": track} | times


def make_timeline(run: str, steps: str) -> str:
    """Write the timeline of a run's steps "first:last", or request a record; return the text to print.

    Raises StepError for steps that can't be recorded, CheckpointError for steps that do not exist.
    """
    wanted = parse_window(steps, f"shoal report {run} --trace {steps}")
    if not (Path(run) / "events").is_dir():
        raise CheckpointError(
            given=f"shoal report {run} --trace {steps}",
            found=f"{run} is not a run directory: it has no events",
            fix="use the directory that the script passes to shoal.Run",
        )
    with raised_as(
        CheckpointError,
        given=f"a timeline in {Path(run) / FOLDER}",
        fix=f"use a run directory that you can write to: see ls -ld {run}",
    ):
        return _made(run, wanted)


def _made(run: str, wanted: Window) -> str:
    folder = Path(run) / FOLDER
    found = list(folder.glob(trace_path(folder, "*", wanted).name))
    if found:
        path = merge_traces(run, *wanted)
        return f"{path}: steps {wanted} of {len(found)} rank(s); open it in ui.perfetto.dev"
    history = read_history(run)
    newest = history.latest
    taken = newest.last if newest is not None else 0
    if taken < wanted.first - 1:
        if newest is not None and outcome_of(newest) is not None:
            raise CheckpointError(
                given=f"shoal report {run} --trace {wanted}",
                found=f"the run has ended, and its last step is {taken:,}",
                fix="use steps that it has taken; or record them when it resumes: "
                f"shoal.Run(…, profile=({wanted.first}, {wanted.last}))",
            )
        return _request(Path(run), wanted, taken)
    path = write_coarse_trace(history, wanted)
    few = (wanted.first, min(wanted.last, wanted.first + MOST - 1))
    so_far = f" up to {taken:,}" if taken < wanted.last else ""
    return (
        f"{path}: steps {wanted}{so_far}, coarse, from the events, since there is no profiler record "
        f"of them; for one, use shoal.Run(…, profile={few}). Open it in ui.perfetto.dev"
    )


def _request(run: Path, wanted: Window, taken: int) -> str:
    write_request(run, check_length(wanted, f"shoal report {run} --trace {wanted}"))
    return (
        f"the run is at step {taken:,}; requested a record of steps {wanted}. "
        "Run the same command again when it has taken them"
    )
