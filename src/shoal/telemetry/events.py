"""The events of a rank: the path of the file, the writer, and the only parser.

The file format is the interface between a run and its readers. Each line is a complete JSON object with
`"event"`, of which `EventKind` lists the kinds that Shoal writes, and `"t"` (seconds since the epoch).
Steps come in blocks, a line of columns for some hundred of them: `step_columns` returns their arrays,
and `read_events` yields them one by one. A killed process can cut its last line in two; the next
attempt starts on a fresh line, and readers skip lines that they cannot parse.

If the disk is full, the run continues: events are kept in memory, up to a bound, until they can be
written.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import orjson

from shoal.telemetry.step_timer import PARTS, Spent, columns
from shoal.util.clock import CLOCK
from shoal.util.regular_file import open_to_write
from shoal.util.safe_text import masked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""A value that JSON can hold."""

FORMAT = 3
FLUSH_STEPS = 512
FLUSH_SECONDS = 2.0
KEPT_BYTES = 16 << 20
"""Size of some 150,000 steps that are kept while the disk is full; later ones are lost."""

EventKind: TypeAlias = Literal[
    "start",
    "restore",
    "steps",
    "log",
    "evaluation",
    "usage",
    "collectives",
    "flops",
    "experts",
    "plan",
    "save",
    "save_failed",
    "preempted",
    "interrupted",
    "failed",
    "corruption",
    "guards",
    "bad_step",
    "rollback",
    "shares",
    "end",
]
"""The kinds of events that readers know; a script may record others with `Run.note`."""

MALFORMED = (ValueError, TypeError, OverflowError, KeyError, RecursionError)
"""Errors that `step_columns` and `json.loads` raise for lines that no run has written."""

_TIMES = ("wall", *PARTS[1:])
_LONG_AGO = 1e9
"""Maximum of a valid duration, in seconds."""
_LONG_LINE = 1 << 12
"""Bytes of a line from which it is a block of steps."""
_NOT_NEEDED = re.compile(rb'"(?:first|share|norm)": ?\[[\[\]\d.eE+\-, nul]*\], ?')
"""Columns that a report does not need, a third of all numbers; a name can't contain their quotes."""
_STEPS = re.compile(rb'\{"event": ?"steps"')
_NUMBERS = re.compile(rb'"step": ?\[[\d, ]*\]')


Row: TypeAlias = tuple[int, int, int, tuple[int, ...], float, Spent, float, float, float, float]
"""A step: its number, first, size, share, the time, spent, loss, norm, counted, load.

Positions are in samples since the start of training; `share` has the bounds of one range of them or of
several. The time is in seconds since the epoch. `spent` is the timeline's total: the time of a step is
the difference from the step before. `load` is the seconds that making the batch took. It is a plain
tuple, since creating a named tuple takes longer than the rest of recording a step.
"""
_TIME: Final = 4


class Events:
    """An append-only file of events. Steps are kept in memory and written in blocks.

    Raises OSError if the file can't be written, or is a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._steps: defaultdict[str, list[Row]] = defaultdict(list)
        self._kept = 0
        self._begun: Spent = (0,) * (1 + len(PARTS))
        self._spent: dict[str, Spent] = {}
        self._waiting = bytearray()
        self._lost = 0
        self._refused = False
        self._file = open_to_write(path, os.O_RDWR | os.O_APPEND)
        self._flushed = CLOCK.wall()
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def begin(self, spent: Spent) -> None:
        """Set the timeline's total from which the next steps are measured."""
        self.flush()
        self._begun, self._spent = spent, {}

    def step(self, name: str, row: Row) -> None:
        """Record a step; a kill loses at most FLUSH_STEPS or FLUSH_SECONDS of steps."""
        self._steps[name].append(row)
        self._kept += 1
        if self._kept >= FLUSH_STEPS or row[_TIME] - self._flushed > FLUSH_SECONDS:
            self.flush()

    def write(self, kind: str, fields: Mapping[str, Plain]) -> None:
        """Record a rare event at once, after the steps that came before it; secrets are masked."""
        self.flush()
        event = {"event": kind, "t": round(CLOCK.wall(), 6), **masked(dict(fields))}
        self._hand_over(f"{json.dumps(without_nonfinite(event))}\n".encode())

    def flush(self) -> None:
        """Pass all recorded events to the operating system, so that a kill loses none of them."""
        if self._kept or self._waiting:
            # First, so that an interruption here never writes them twice.
            steps, self._steps, self._kept = self._steps, defaultdict(list), 0
            self._hand_over(b"".join(self._line(name, rows) for name, rows in steps.items()))
        self._flushed = CLOCK.wall()

    def close(self) -> None:
        """Flush and close; closing twice is allowed."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1
            if self._lost or self._waiting:
                lost = self._lost + len(self._waiting)
                warnings.warn(f"{lost:,} bytes of events for {self.path} are lost", stacklevel=2)

    def _line(self, name: str, rows: list[Row]) -> bytes:
        step, first, size, share, times, spent, loss, norm, counted, load = zip(*rows, strict=True)
        before = self._spent.get(name, self._begun)
        self._spent[name] = spent[-1]
        fields = {
            "event": "steps",
            "t": round(times[-1], 6),
            "name": name,
            "step": step,
            "first": first,
            "size": size,
            "share": share,
            "counted": counted,
            "loss": loss,
            "norm": norm,
            "load": [round(1e6 * seconds) for seconds in load],
            **columns([before, *spent]),
        }
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)

    def _hand_over(self, lines: bytes) -> None:
        if len(self._waiting) < KEPT_BYTES:
            self._waiting += lines
        else:
            self._lost += len(lines)
        try:
            while self._waiting:  # a disk that fills up accepts a part
                del self._waiting[: os.write(self._file, self._waiting)]
            self._refused = False
        except OSError as error:
            if not self._refused:
                warnings.warn(f"events are kept in memory: {self.path}: {error}", stacklevel=3)
            self._refused = True


def path_of(run: str | Path, rank: int) -> Path:
    """Return the file of a rank's events in a run directory."""
    return Path(run) / "events" / f"rank-{rank}.jsonl"


def paths_in(directory: str | Path) -> dict[int, Path]:
    """Return the files of events by rank, in order: of a run directory, or of the `events` in it."""
    inside = path_of(directory, 0).parent
    folder = inside if inside.is_dir() else Path(directory)
    found = {}
    try:
        for path in folder.glob("rank-*.jsonl"):
            number = path.stem.removeprefix("rank-")
            if number.isascii() and number.isdecimal() and len(number) < 8 and path.is_file():
                found[int(number)] = path
    except OSError:  # no directory, or no permission to list it
        return {}
    return dict(sorted(found.items()))


def parse_event(line: bytes, *, brief: bool = False) -> dict[str, Any] | None:
    """Return the event of a line, or None if it holds none.

    With `brief`, a block of steps may lack the columns that a report does not need.
    """
    try:
        event = json.loads(_NOT_NEEDED.sub(b"", line) if brief and len(line) > _LONG_LINE else line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def count_steps(line: bytes) -> int | None:
    """Return the number of steps in a line, without parsing it; None if it is not a block of steps."""
    if _STEPS.match(line) is None:
        return None
    column = _NUMBERS.search(line)
    return 0 if column is None else column[0].count(b",") + 1


def step_columns(block: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the columns of a block of steps: "step", "time", and the others that the block has.

    Times are in seconds. Invalid ones, negative or NaN, are replaced by 0. Raises one of MALFORMED if
    it is not a block of steps.
    """
    import numpy as np  # not needed by processes that only write

    number = np.array(block["step"], np.int64)
    count = len(number)
    times = float(block["t"]) - np.array(block.get("at", [0] * count), np.float64) / 1e6
    if number.ndim != 1 or times.shape != (count,) or not np.isfinite(times).all():
        raise ValueError("a column of another length")
    columns = {"step": number, "time": times}
    for name in ("loss", "counted", "size"):
        if name in block:
            columns[name] = _column(block[name], count)
    columns["load"] = _durations(block["load"], count)
    for name in _TIMES:
        if name in block:
            columns[name] = _durations(block[name], count)
    return columns


def _durations(values: object, count: int) -> NDArray[np.float64]:
    """Return durations in seconds from microseconds; 0 for invalid ones."""
    import numpy as np

    found = _column(values, count) / 1e6
    if not (found.min(initial=0) >= 0 and found.max(initial=0) <= _LONG_AGO):  # also if one is NaN
        found = np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0).clip(0.0, _LONG_AGO)
    return found


def _column(values: object, count: int) -> NDArray[np.float64]:
    import numpy as np

    found = np.array(values, np.float64)
    if found.shape != (count,):
        raise ValueError("a column of another length")
    return found


def read_events(path: str | Path, *, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of one file in order, without incomplete lines from a kill.

    Steps come one by one, as "step", times in seconds. With `last`, yield only the
    events in that many bytes at the end of the file.
    """
    with Path(path).open("rb") as lines:
        if last is not None:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - last))
        for event in filter(None, map(parse_event, lines)):
            if event["event"] == "steps":
                yield from _single_steps(event)
            else:
                yield event


def _single_steps(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a block; none if this module has not written it."""
    try:
        columns = step_columns(block)
    except MALFORMED:
        return
    count = len(columns["step"])
    absent = [0.0] * count
    parts = {name: columns[name].tolist() if name in columns else absent for name in (*_TIMES, "load")}
    others = {
        name: values
        for name, values in block.items()
        if isinstance(values, list) and len(values) == count and name not in ("at", *parts)
    }
    name, times = block.get("name"), columns["time"].tolist()
    for place, time_of in enumerate(times):
        event: dict[str, Any] = {"event": "step", "t": round(time_of, 6), "name": name}
        event |= {name: values[place] for name, values in others.items()}
        yield event | {name: values[place] for name, values in parts.items()}


def steps_by_rank(directory: str | Path) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """Return the record of each rank of each step, by (name, step), from the last attempt that took it.

    The next attempt repeats the steps that a killed one took after its latest complete checkpoint,
    and may have fewer ranks; a rollback repeats steps within an attempt. So a record counts if it is of
    the same attempt as rank 0's last one, and no restore has dropped it. `directory` is a run
    directory, or the `events` in it.
    """
    found: dict[tuple[str, int], dict[int, tuple[Any, dict[str, Any]]]] = {}
    for rank, path in paths_in(directory).items():
        attempt = None
        for event in read_events(path):
            if event["event"] == "start":
                attempt = event.get("began")
            elif event["event"] == "restore":
                _forget_later(found, rank, event.get("position"))
            elif event["event"] == "step" and _is_step(event):
                found.setdefault((event["name"], event["step"]), {})[rank] = attempt, event
    return {
        key: {rank: event for rank, (attempt, event) in ranks.items() if attempt == ranks[0][0]}
        for key, ranks in found.items()
        if 0 in ranks
    }


def _forget_later(
    found: Mapping[Any, dict[int, tuple[Any, dict[str, Any]]]], rank: int, position: object
) -> None:
    """Drop the records of a rank from a position on, from which the run has continued."""
    for ranks in found.values():
        first = ranks[rank][1].get("first") if rank in ranks else None
        if isinstance(first, int) and isinstance(position, int) and first >= position:
            del ranks[rank]


def _is_step(event: Mapping[str, Any]) -> bool:
    """Return whether an event has the fields of a step; a line from another program may not."""
    share = event.get("share")
    return (
        isinstance(event.get("name"), str)
        and type(event.get("step")) is int
        and isinstance(share, list)
        and {type(each) for each in share} == {int}
        and len(share) % 2 == 0
    )


def without_nonfinite(value: Plain) -> Plain:
    """Return the value as JSON can hold it, with None in place of NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nonfinite(item) for item in value]
    return value
