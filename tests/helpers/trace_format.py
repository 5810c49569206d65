"""Timelines read back, and held to the format that Chrome and Perfetto load."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PHASES = {"X", "M", "s", "t", "f", "i", "C", "B", "E"}


def checked_events(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline, each of which has what its phase asks for."""
    with gzip.open(path, "rt") as file:
        whole = json.load(file)
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = whole["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] not in "stf" or "id" in event
        assert event["ph"] != "M" or event["args"]
    _check_nesting([event for event in events if event["ph"] == "X"])
    return events


def _check_nesting(ranges: list[dict[str, Any]]) -> None:
    """On each line, what begins within a range ends in it."""
    around: dict[tuple[int, int], list[float]] = {}
    for each in sorted(ranges, key=lambda each: (each["ts"], -each["dur"])):
        ends = around.setdefault((each["pid"], each["tid"]), [])
        while ends and ends[-1] <= each["ts"] + 1e-4:
            ends.pop()
        assert not ends or each["ts"] + each["dur"] <= ends[-1] + 1e-3, each
        ends.append(each["ts"] + each["dur"])


def steps_of(events: list[dict[str, Any]], rank: int) -> dict[int, float]:
    """When the steps of a rank begin, in µs."""
    return {
        int(event["name"].removeprefix("step ")): event["ts"]
        for event in events
        if event["ph"] == "X" and event["pid"] == rank and event["tid"] == 0
    }
