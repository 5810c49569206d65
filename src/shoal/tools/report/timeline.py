"""`shoal report RUN --trace a:b`: merge the ranks' records of steps into one timeline.

The format is Chrome's trace format, which Perfetto also reads. The times of all ranks are converted to
rank 0's clock: profiler times to the rank's own clock by the steps that both have recorded, and those
to rank 0's clock by the offsets measured in the window.

Without records, it requests them, or draws a timeline from the events. This is coarse: they have the
length of each part of a step but not its position, so the parts are drawn one after the other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from shoal.telemetry.clock_offset import ClockOffset, offset_at
from shoal.telemetry.profiler.window import (
    FOLDER,
    FORMAT,
    MARK,
    MOST,
    Window,
    check_length,
    parse_window,
    trace_path,
    write_request,
)
from shoal.tools.report import PARTS, History, read_history
from shoal.tools.report.attempts import outcome_of
from shoal.util.errors import CheckpointError, raised_as
from shoal.util.regular_file import appearing
from shoal.util.safe_text import printable

Event = dict[str, Any]
STEPS_TRACK = 0
"""The first track of each rank: its steps, as ranges."""
_FLOWS = "stf"
_MARGIN = 1e5
"""Time before the first rank's first step, in µs: the others begin within less than it."""


@dataclass
class RankTrace:
    """The record of one rank: the profiler's events, and the conversion to rank 0's clock."""

    rank: int
    host: str
    events: list[Event]
    begins: dict[int, float]
    """Start times of steps, by this rank's own clock, in µs."""
    shift: float
    """The offset to add to the profiler's µs for that clock."""
    offsets: list[ClockOffset]
    tracks: dict[tuple[Any, Any], int] = field(default_factory=dict)

    def time(self, own: float) -> float:
        """Convert a time of this rank to rank 0's clock; both in µs."""
        return own + offset_at(self.offsets, own * 1e3) / 1e3

    def align(self, begins: Mapping[int, float]) -> None:
        """If no offsets were measured, align the starts of steps with those of others."""
        late = [begins[n] - own for n, own in self.begins.items() if n in begins]
        self.offsets = [ClockOffset(0, round(median(late) * 1e3) if late else 0, 0)]


def merge_traces(run: str | Path, first: int, last: int) -> Path:
    """Merge the ranks' records of these steps, and return the file.

    Raises CheckpointError if there is no record, or one is damaged.
    """
    window = Window(first, last)
    folder = Path(run) / FOLDER
    paths = sorted(folder.glob(trace_path(folder, "*", window).name))
    if not paths:
        raise CheckpointError(
            given=f"a timeline of steps {window} in {run}",
            found="no rank has recorded them",
            fix=f"record them with shoal.Run(…, profile=({first}, {last})), or see which records "
            f"exist: ls {folder}",
        )
    return write_trace(folder, window, _merged(paths))


def write_trace(folder: Path, window: Window, events: Iterable[Event]) -> Path:
    """Write events as a trace, one by one, since there may be millions."""
    path = folder / f"steps-{window.first}-{window.last}.json.gz"
    with (
        appearing(path) as part,
        gzip.open(part, "wt", encoding="utf-8", compresslevel=5) as file,
    ):
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
    return path


def rank_track_names(rank: int, host: str) -> list[Event]:
    """Return the events that make a rank a process of the timeline, with a track for its steps."""
    name = f"rank {rank} on {printable(host)}" if host else f"rank {rank}"
    return [
        metadata_event("process_name", rank, STEPS_TRACK, name=name),
        metadata_event("process_sort_index", rank, STEPS_TRACK, sort_index=rank),
        metadata_event("thread_name", rank, STEPS_TRACK, name="steps"),
        metadata_event("thread_sort_index", rank, STEPS_TRACK, sort_index=STEPS_TRACK),
    ]


def metadata_event(kind: str, rank: int, track: int, **what: str | int) -> Event:
    """Return an event that sets a property of a process or a track of the timeline."""
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "ts": 0, "args": what}


def _merged(paths: list[Path]) -> Iterator[Event]:
    reference: dict[int, float] = {}
    for path in paths:  # one at a time: each may take much memory
        record = read_rank_trace(path)
        if record.offsets:
            sure = max(offset.uncertainty for offset in record.offsets)
            label = f"clock within {sure / 1e3:.0f} µs of rank 0's"
        else:
            record.align(reference)
            label = "clock unknown: steps are aligned with those of other ranks"
        reference = reference or {n: record.time(own) for n, own in record.begins.items()}
        zero = min(reference.values()) - _MARGIN
        yield from rank_track_names(record.rank, record.host)
        yield metadata_event("process_labels", record.rank, STEPS_TRACK, labels=label)
        begun = min(record.begins.values())
        for event in record.events:
            own = event["ts"] + record.shift
            if event["ph"] != "M" and own >= begun - 1:  # earlier events are the start of the profiler
                yield _placed(record, event, own, zero, len(paths))
        yield from _tracks(record)


def _placed(record: RankTrace, event: Event, own: float, zero: float, ranks: int) -> Event:
    """Return a profiler event, at time `own` by the rank's clock, as an event of the timeline."""
    begin = round(record.time(own) - zero, 3)
    placed: Event = event | {"pid": record.rank, "ts": begin}
    if isinstance(event.get("dur"), int | float):
        # By its end: with a rounded duration it would overlap the next one.
        end = round(record.time(own + event["dur"]) - zero, 3)
        placed["dur"] = round(end - begin, 3)
    if event["name"].startswith(MARK) and event.get("cat") == "user_annotation":
        return placed | {"tid": STEPS_TRACK, "name": event["name"].removeprefix("shoal "), "args": {}}
    key = event["pid"], event["tid"]
    placed["tid"] = record.tracks.setdefault(key, len(record.tracks) + 1)
    if event["ph"] in _FLOWS and isinstance(event.get("id"), int):
        placed["id"] = event["id"] * ranks + record.rank  # arrows begin and end on the same rank
    return placed


def _tracks(record: RankTrace) -> Iterator[Event]:
    """Yield the names of the tracks: threads and streams, as the profiler has them."""
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in record.events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for key, track in record.tracks.items():
        name = printable(names.get(key, f"thread {key[1]}"))
        yield metadata_event("thread_name", record.rank, track, name=name)
        yield metadata_event("thread_sort_index", record.rank, track, sort_index=track)


def read_rank_trace(path: Path) -> RankTrace:
    """Return the record of a rank; raise CheckpointError if the file is not one."""
    try:
        with gzip.open(path, "rb") as file:
            whole = json.load(file)
        own = whole["shoal"]
        if own["format"] != FORMAT:
            raise ValueError(f"of format {own['format']}")
        events = [event for event in whole["traceEvents"] if _is_event(event)]
        begins = {int(step): time / 1e3 for step, time in own["begins"]}
        return RankTrace(
            rank=int(own["rank"]),
            host=str(own["host"]),
            events=events,
            begins=begins,
            shift=_shift(events, begins),
            offsets=[ClockOffset(*map(int, each)) for each in own["offsets"]],
        )
    except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            given=str(path),
            found=f"not a record of a rank: {type(error).__name__}: {error}",
            fix="remove it, and request these steps again in the next run",
        ) from None


def _is_event(event: object) -> bool:
    """Return whether it belongs to a thread or a stream; others describe the profiler itself."""
    match event:
        case {"ph": str(), "name": str(), "pid": int(), "tid": int(), "ts": int() | float()}:
            return True
    return False


def _shift(events: Iterable[Mapping[str, Any]], begins: Mapping[int, float]) -> float:
    """Return the offset from the profiler's clock to the rank's, by the steps that both recorded."""
    noted = [
        begins[number] - event["ts"]
        for event in events
        if event["ph"] == "X" and event["name"].startswith(MARK)
        if (number := int(event["name"].removeprefix(MARK))) in begins
    ]
    if not noted:
        raise ValueError("it has no step in it")
    # A step's time is taken before its mark is made; in between a rank may have had to wait.
    return float(max(noted))


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
