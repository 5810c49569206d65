"""How an earlier attempt split its batches, from the events of the run."""

from __future__ import annotations

from pathlib import Path

from shoal.telemetry.events import read_events

_LAST_BYTES = 16 << 20
"""The end of the file of events that is read: some 150,000 steps."""


def recorded_splits(path: Path, position: int) -> tuple[dict[int, list[int]], int]:
    """Return the numbers of samples of each rank from `position` on, by the first position of each.

    Also returns the position that earlier attempts have reached.
    """
    splits: dict[int, list[int]] = {}
    reached = position
    for event in read_events(path, last=_LAST_BYTES):
        if event["event"] == "step":
            first, size = event.get("first"), event.get("size")
            if type(first) is int and type(size) is int:
                reached = max(reached, first + size)
        elif event["event"] == "shares" and type(first := event.get("position")) is int:
            samples = event.get("samples")
            if first >= position and isinstance(samples, list):
                splits[first] = [number for number in samples if type(number) is int]
    return splits, reached
