"""The records of all ranks as one timeline in Chrome's trace format, which Perfetto also reads.

The times of all ranks are converted to rank 0's clock: profiler times to the rank's own clock by the
steps that both have recorded, and those to rank 0's clock by the offsets measured in the window.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shoal.telemetry.clock_offset import ClockOffset, offset_at
from shoal.telemetry.profiler.window import FOLDER, FORMAT, MARK, Window, trace_path
from shoal.util.errors import CheckpointError
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
