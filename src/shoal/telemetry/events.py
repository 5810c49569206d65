"""What a rank records while it runs: one line of JSON per event, cheap enough to stay on.

The file format is the interface between a run and its readers. Lines are complete JSON objects with
`"event"` and `"t"` (seconds since the epoch). Steps come in blocks, a line of columns for some hundred
of them; `read_events` gives them one by one. A killed process can cut its last line in two; the next
attempt starts on a fresh line, and readers skip what does not parse.

A disk that takes nothing just now, being full, does not end a run: what is to be recorded is kept in
memory, up to a bound, until it does.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson

from shoal.telemetry.step_timer import PARTS, Spent, columns
from shoal.util.regular_file import open_to_write
from shoal.util.text import masked

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""What JSON holds."""

FORMAT = 3
"""`read_events` and `steps` also take 1, in which each step had a line, and 2, which had no "load"."""
FLUSH_STEPS = 512
FLUSH_SECONDS = 2.0
KEPT_BYTES = 16 << 20
"""Some 150,000 steps, while the disk takes nothing; what comes after these is lost."""

_TIMES = ("wall", *PARTS[1:])


Row: TypeAlias = tuple[int, int, int, tuple[int, int], float, Spent, float, float, float, float]
"""A step: its number, first, size, share, the time, spent, loss, norm, counted, load.

Positions are in samples since the start of training, the time in seconds since the epoch. `spent` is
what the timeline has come to: the time of a step is that since the step before. `load` is the seconds
that making the batch took. A plain tuple, since to make one with names takes longer than all else
that keeping it does.
"""
_TIME: Final = 4


class Events:
    """An append-only file of events. Steps are kept in memory and written in blocks.

    Raises OSError where the file can't be written, or is a symbolic link.
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
        self._flushed = time.time()
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def begin(self, spent: Spent) -> None:
        """The steps to come begin where so much had been spent."""
        self.flush()
        self._begun, self._spent = spent, {}

    def step(self, name: str, row: Row) -> None:
        """Record a step; at most FLUSH_STEPS or FLUSH_SECONDS of them are lost by a kill."""
        self._steps[name].append(row)
        self._kept += 1
        if self._kept >= FLUSH_STEPS or row[_TIME] - self._flushed > FLUSH_SECONDS:
            self.flush()

    def write(self, kind: str, fields: Mapping[str, Plain]) -> None:
        """Record a rare event at once, after the steps that came before it; secrets are masked."""
        self.flush()
        event = {"event": kind, "t": round(time.time(), 6), **masked(dict(fields))}
        self._hand_over(f"{json.dumps(finite(event))}\n".encode())

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system: a killed process loses none."""
        if self._kept or self._waiting:
            # First, so that what is interrupted here is never written twice.
            steps, self._steps, self._kept = self._steps, defaultdict(list), 0
            self._hand_over(b"".join(self._line(name, rows) for name, rows in steps.items()))
        self._flushed = time.time()

    def close(self) -> None:
        """Flush and close; closing twice is fine."""
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
            while self._waiting:  # a disk that fills up takes a part
                del self._waiting[: os.write(self._file, self._waiting)]
            self._refused = False
        except OSError as error:
            if not self._refused:
                warnings.warn(f"events are kept in memory: {self.path}: {error}", stacklevel=3)
            self._refused = True


def read_events(path: str | Path, *, last: int | None = None) -> Iterator[dict[str, Any]]:
    """The events of one file in order, without the lines that a kill cut in two.

    Steps come one by one, as "step", times in seconds, whatever the format. With `last` only those in
    so many bytes at its end.
    """
    with Path(path).open("rb") as lines:
        if last is not None:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - last))
        for line in lines:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(event, dict) or "event" not in event:
                continue
            if event["event"] == "steps":
                yield from _single(event)
            else:
                yield event


def _single(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a block; none where it is not what this module writes."""
    length = len(block["step"]) if isinstance(block.get("step"), list) else 0
    found = {n: each for n, each in block.items() if isinstance(each, list) and len(each) == length}
    names = ("at", *_TIMES, *(("load",) if "load" in found else ()))
    times = [found.pop(name, [0] * length) for name in names]
    last, name = block.get("t"), block.get("name")
    if not all(map(_is_number, (last, *chain(*times)))):
        return
    rows = zip(zip(*found.values(), strict=True), zip(*times, strict=True), strict=True)
    for values, microseconds in rows:
        at, *parts = (each / 1e6 for each in microseconds)
        event: dict[str, Any] = {"event": "step", "t": round(last - at, 6), "name": name}
        event |= zip(found, values, strict=True)
        yield event | dict(zip(names[1:], parts, strict=True))


def steps(directory: str | Path) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """Of each step, by (name, step), the record of each rank: of the last attempt that took it.

    What a killed attempt did after its last checkpoint is done again by the next, perhaps on fewer
    ranks; so a record counts if it is of the same attempt as rank 0's last one. `directory` is a
    run's, or the `events` in it.
    """
    found: dict[tuple[str, int], dict[int, tuple[Any, dict[str, Any]]]] = {}
    directory = Path(directory)
    inside = directory / "events"
    for path in (inside if inside.is_dir() else directory).glob("rank-*.jsonl"):
        number, attempt = path.stem.removeprefix("rank-"), None
        if not number.isdecimal():
            continue
        rank = int(number)
        for event in read_events(path):
            if event["event"] == "start":
                attempt = event.get("began")
            elif event["event"] == "step" and _is_step(event):
                found.setdefault((event["name"], event["step"]), {})[rank] = attempt, event
    return {
        key: {rank: event for rank, (attempt, event) in ranks.items() if attempt == ranks[0][0]}
        for key, ranks in found.items()
        if 0 in ranks
    }


def _is_step(event: Mapping[str, Any]) -> bool:
    """Whether it says what every step says; a line of somebody else's may not."""
    share = event.get("share")
    return (
        isinstance(event.get("name"), str)
        and type(event.get("step")) is int
        and isinstance(share, list)
        and [type(each) for each in share] == [int, int]
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def finite(value: Plain) -> Plain:
    """The value as JSON holds it, which has no word for NaN and infinity: None in their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
