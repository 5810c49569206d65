"""How the last attempt of a run ended, by the records of its ranks: `shoal last-exit`.

The exit code of `mpiexec` does not tell: MPICH combines those of the ranks with a bitwise or, and Open
MPI reports a rank that saved and left as a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.distributed.cluster_env import REQUEUE
from shoal.telemetry.events import parse_event, paths_in
from shoal.util.arguments import is_integer, is_number
from shoal.util.differences import spans
from shoal.util.errors import CheckpointError

FAILED, INTERRUPTED = 1, 130
_CODES = {"preempted": REQUEUE, "interrupted": INTERRUPTED, "failed": FAILED}
_MOST_RANKS = 10**6


@dataclass(frozen=True, kw_only=True)
class LastExit:
    """The exit code for the last attempt of a run, and how it ended as text."""

    code: int
    text: str


@dataclass
class _RankRecord:
    """The last start of a rank and what it recorded afterwards, by kind of event."""

    start: Mapping[str, Any]
    later: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """A key of `_CODES`, "finished", or how the rank failed."""
        end = self.later.get("end")
        if end is None:
            return "was killed, or still runs"
        if end.get("reason") != "closed":
            return f"raised {end.get('error')}"
        return next((kind for kind in _CODES if kind in self.later), "finished")


def last_exit(run: str | Path, *, newer: str | Path | None = None) -> LastExit:
    """Return the exit code of the last attempt: 75 only if all its ranks have saved and left.

    It is 0 if all ranks have closed the run, 130 if they have saved after Ctrl-C, and 1 otherwise, also
    without any record. With `newer`, a file, a rank whose record is not newer has none: it ended before
    it had opened the run. Raises CheckpointError for a file that can't be read.
    """
    paths = paths_in(run)
    if newer is not None:
        touched = Path(newer).stat().st_mtime_ns
        paths = {rank: path for rank, path in paths.items() if path.stat().st_mtime_ns > touched}
    records = {rank: found for rank, path in paths.items() if (found := _read(path)) is not None}
    if not records:
        missing = "" if Path(run).is_dir() else "; there is no such directory"
        return LastExit(code=FAILED, text=f"no rank has recorded a start of this run{missing}")
    began = max(record.start["began"] for record in records.values())
    records = {rank: each for rank, each in records.items() if each.start["began"] == began}
    size = max(int(record.start["size"]) for record in records.values())
    outcomes: dict[str, list[int]] = {}
    for rank in range(size):
        outcome = records[rank].outcome if rank in records else "has recorded no start"
        outcomes.setdefault(outcome, []).append(rank)
    text = "; ".join(f"rank {spans(ranks)} {how}" for how, ranks in outcomes.items())
    code = FAILED
    if len(outcomes) == 1:
        code = {**_CODES, "finished": 0}.get(next(iter(outcomes)), FAILED)
    return LastExit(code=code, text=f"{text} (of {size})")


def _read(path: Path) -> _RankRecord | None:
    record = None
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(
            given=str(path), found=f"it can't be read: {error.strerror}", fix="check its permissions"
        ) from None
    with file as lines:
        for line in lines:
            if line.startswith(b'{"event": "steps"'):
                continue
            event = parse_event(line)
            if event is None:
                continue
            if event["event"] == "start":
                record = _RankRecord(start=event) if _is_start(event) else None
            elif record is not None:
                record.later[event["event"]] = event
    return record


def _is_start(event: Mapping[str, Any]) -> bool:
    """Return whether an event is one that a run has written, rather than damage."""
    size, began = event.get("size"), event.get("began")
    return is_integer(size, least=1) and size <= _MOST_RANKS and is_number(began)
