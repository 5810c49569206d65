"""Reads the events of a run, and continues to read while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from shoal.distributed.env_vars import safe_path
from shoal.telemetry.events import (
    MALFORMED,
    count_steps,
    parse_event,
    paths_in,
    step_columns,
)
from shoal.tools.report.history import (
    STEP,
    USAGE,
    Array,
    Attempt,
    Event,
    GrowingArray,
    History,
    TrafficTotal,
    text_in,
)
from shoal.util.errors import CheckpointError

BLOCK = 4 << 20
LARGE = 64 << 20
"""Bytes of events from which starting more reader processes pays off."""
MOST_PROCESSES = 8
LONGEST = 64 << 20
"""Maximum length of a line in bytes; a longer line was not written by a run."""
NEVER = 1e11
"""Latest valid time in seconds since the epoch: no run lasts into the year 5138."""
MOST_STEPS = 4
"""Number of Steps that may have a tick in common before too few steps of each are kept."""
_FROM_RANK_0 = {"log", "evaluation"}
"""Events that are the same on all ranks, or of which only rank 0's are shown."""


@dataclass
class _File:
    """How far the file of one rank has been read."""

    path: Path
    rank: int
    offset: int = 0
    attempt: Attempt | None = None
    waiting: list[Event] = field(default_factory=list)
    """Events from before the start of the attempt to which they belong."""


class Reader:
    """A reader of a run directory, or of `events` in it; `poll` reads the events written since.

    Files may be missing, empty, truncated, or contain lines that no run has written. `history`
    holds all that can be read and counts the rest. `only` limits reading to one rank. Raises
    CheckpointError if there are no events at all.

    A reader that runs for long takes `keep`: then only the newest steps of each rank are held, at most
    twice that number, only the newest other events, and no logged values. `seen` is called with steps
    as they are read: their attempt, the rank, the name of the Step, and the rows. It gets all steps of
    the lowest rank.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        only: int | None = None,
        keep: int | None = None,
        seen: Callable[[Attempt, int, str, Array], None] | None = None,
    ) -> None:
        directory = Path(directory)
        self._only = only
        self._files: dict[int, _File] = {}
        self._keep, self._seen = keep, seen
        self.history = History(directory)
        if not self.paths():
            raise CheckpointError(
                given=str(directory),
                found=_absence(directory),
                fix=_suggestion(directory),
            )

    def poll(self) -> bool:
        """Read new events in all files; return whether there were any."""
        # A file that shrank belongs to another run in the same place.
        if any(0 < _size(each.path) < each.offset for each in self._files.values()):
            self._files.clear()
            self.history = History(self.history.directory)
        new = False
        paths = self.paths()
        for rank, path in paths.items():
            file = self._files.setdefault(rank, _File(path, rank))
            for lines in _blocks(file, self.history):
                few = self._keep is not None and rank > min(paths)
                self._take(file, _newest(lines, self._keep or 0) if few else lines)
                new = True
        self.history.files = len(self._files)
        return new

    def paths(self) -> dict[int, Path]:
        """Return the event files, by rank."""
        found = paths_in(self.history.directory)
        return {rank: path for rank, path in found.items() if self._only in (None, rank)}

    def _take(self, file: _File, lines: list[bytes]) -> None:
        for line in filter(bytes.strip, lines):
            try:
                self._event(file, parse_event(line, brief=True))
            except MALFORMED:
                self.history.skipped += 1
        self._shorten(file)

    def _event(self, file: _File, event: Event | None) -> None:
        if event is None:
            raise ValueError("not an event")
        kind, time = event["event"], float(event.get("t", 0.0))
        match kind:
            case "start":
                began = float(event.get("began", time))
                if not np.isfinite(began):
                    raise ValueError("an attempt without a start time")
                file.attempt = self.history.attempt(began, after=file.attempt)
                file.attempt.starts[file.rank] = event
                file.attempt.events += [(file.rank, waiting) for waiting in file.waiting]
                file.waiting.clear()
            case "steps":
                self._steps(file, event)
            case "usage":
                _add_usage(self._attempt(file), file.rank, event)
            case "collectives":
                _add_traffic(self._attempt(file), file.rank, event)
            case "experts":  # of many layers, they would fill the memory
                found = self._attempt(file).experts.setdefault((file.rank, text_in(event, "name")), [])
                found[:] = [*found[-1:], event]
            case _ if kind == "restore" or file.attempt is None:
                file.waiting.append(event)
            case _ if kind not in _FROM_RANK_0 or (file.rank == 0 and self._keep is None):
                file.attempt.events.append((file.rank, event))
        if file.attempt is not None and abs(time) < NEVER:
            file.attempt.seen = max(file.attempt.seen, time)

    def _steps(self, file: _File, block: Event) -> None:
        name, columns = block["name"], step_columns(block)
        if not isinstance(name, str):
            raise TypeError("a Step without a name")
        attempt, name = self._attempt(file), name[:200]
        added = _add(attempt, file.rank, name, columns)
        if self._seen is not None:
            self._seen(attempt, file.rank, name, added)

    def _shorten(self, file: _File) -> None:
        """Drop old steps and events of a file's attempt if little is to be kept."""
        if self._keep is None or file.attempt is None:
            return
        for (rank, _), rows in file.attempt.steps.items():
            if rank == file.rank:
                rows.shorten(self._keep)
        if file.rank in file.attempt.usage:
            file.attempt.usage[file.rank].shorten(self._keep)
        del file.attempt.events[: -64 * self._keep]

    def _attempt(self, file: _File) -> Attempt:
        if file.attempt is None:  # its first line was lost
            file.attempt = self.history.attempt(0.0)
        return file.attempt


def read_history(directory: str | Path) -> History:
    """Return all events so far; several processes read a large run, one rank at a time each.

    Raises CheckpointError if there are no events at all.
    """
    reader = Reader(directory)
    paths = reader.paths()
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(paths))
    if processes < 2 or sum(map(_size, paths.values())) < LARGE:
        reader.poll()
        return reader.history
    with safe_path(), ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for history in pool.map(_read_one, repeat(directory), paths):
            reader.history.join(history)
    return reader.history


def _read_one(directory: str | Path, rank: int) -> History:
    reader = Reader(directory, only=rank)
    reader.poll()
    return reader.history


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _absence(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory"
    if not directory.is_dir():
        return "it is a file, not a run directory"
    return "no events in it (events/rank-0.jsonl, …): it is not a run directory, or has not started"


def _suggestion(directory: Path) -> str:
    try:
        inside = sorted(each.parent for each in directory.glob("*/events") if each.is_dir())
    except OSError:
        inside = []
    if inside:
        return f"a run in it: {', '.join(str(each) for each in inside[:5])}"
    return "use the directory that the script passes to shoal.Run, as in `shoal report runs/a`"


def _blocks(file: _File, history: History) -> Iterator[list[bytes]]:
    """Yield the complete new lines of a file; an incomplete last line is left for later."""
    try:
        with file.path.open("rb") as data:
            data.seek(file.offset)
            kept = b""
            while block := data.read(BLOCK):
                kept += block
                whole, newline, rest = kept.rpartition(b"\n")
                if newline:
                    file.offset += len(whole) + 1
                    kept = rest
                    yield whole.split(b"\n")
                elif len(kept) > LONGEST:
                    file.offset += len(kept)
                    kept = b""
                    history.skipped += 1
        history.unread.pop(file.rank, None)
    except FileNotFoundError:  # deleted: as if it had never existed
        return
    except OSError as error:
        history.unread[file.rank] = error.strerror or str(error)


def _newest(lines: list[bytes], keep: int) -> list[bytes]:
    """Return the lines other than blocks of steps, and the newest blocks, which hold `keep` steps."""
    found, count = [], 0
    for line in reversed(lines):
        steps = count_steps(line)
        if steps is None or count < keep * MOST_STEPS:
            found.append(line)
        count += steps or 0
    return found[::-1]


def _add(attempt: Attempt, rank: int, name: str, columns: Mapping[str, Array]) -> Array:
    rows = attempt.steps.setdefault((rank, name), GrowingArray(STEP))
    added = rows.append(len(columns["step"]))
    if "size" in columns:
        columns = {**columns, "size": np.clip(np.nan_to_num(columns["size"]), 0, 2**31 - 128)}
    for column in ("loss", "counted"):
        added[column] = np.nan
    with np.errstate(over="ignore"):  # a loss that float32 can't hold becomes infinite
        for column, values in columns.items():
            added[column] = values
    return added


def _add_usage(attempt: Attempt, rank: int, event: Mapping[str, Any]) -> None:
    names = [name for name in USAGE.names or () if name != "time"]
    values = [float(event["t"]), *(float(event.get(name, np.nan)) for name in names)]
    attempt.usage.setdefault(rank, GrowingArray(USAGE)).append(1)[0] = tuple(values)


def _add_traffic(attempt: Attempt, rank: int, event: Mapping[str, Any]) -> None:
    for each in event["kinds"]:
        kind, group, backend = (str(each[name])[:200] for name in ("kind", "group", "backend"))
        seconds, size = float(each["seconds"]), float(each["bytes"])
        bus = float(each.get("bus", 0.0) or 0.0)
        if not np.isfinite([seconds, size, bus]).all():
            raise ValueError("a collective without a duration")
        sums = attempt.traffic.setdefault(
            (rank, (kind, group, int(each["ranks"]), backend)), TrafficTotal()
        )
        sums.calls += int(each["calls"])
        sums.bytes += size
        sums.seconds += seconds
        sums.moved += bus * seconds
        sums.exact = sums.exact and bool(each.get("exact", False))
