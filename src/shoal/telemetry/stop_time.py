"""The time that a run takes to stop with a save, by the record of rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.telemetry.events import path_of, read_events
from shoal.util.arguments import is_number

_TAIL = 8 << 20
_STEPS, _SAVES = 200, 5
_LONGEST = 1e9  # seconds
_PARTS = ("wait", "transfer", "forward", "backward", "communication", "update")


def stopping_seconds(run: Path) -> float | None:
    """Return the seconds of a step and a save, the longest of rank 0's last; None without a save."""
    saves: deque[float] = deque(maxlen=_SAVES)
    steps: deque[float] = deque(maxlen=_STEPS)
    for event in last_events(run):
        if event["event"] == "save":
            saves += _duration(event.get("seconds"))
        elif event["event"] == "step":
            steps.append(sum(second for part in _PARTS for second in _duration(event.get(part))))
    return None if not saves else max(saves) + max(steps, default=0.0)


def last_events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of rank 0, or the last megabytes of them; none if there is no record."""
    try:
        yield from read_events(path_of(run, 0), last=_TAIL)
    except OSError:
        return


def _duration(value: object) -> list[float]:
    """Return the value if it can be a duration, since the file may come from another user."""
    return [float(value)] if is_number(value) and 0 <= value < _LONGEST else []
