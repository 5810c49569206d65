"""Reads and judges the events of runs, for the report page, `shoal watch` and timelines.

`Reader` and `read_history` read the events of a run. `profile` returns the time per part of a step,
`find_bottleneck` the verdict. `html` builds pages from plain values.
"""

from __future__ import annotations

from shoal.tools.report.bottleneck import BottleneckReport, find_bottleneck
from shoal.tools.report.breakdown import LABELS, SHOWN, Profile, profile
from shoal.tools.report.causes import AttemptProfile, Finding
from shoal.tools.report.history import PARTS, Array, Attempt, Event, GrowingArray, History, TrafficTotal
from shoal.tools.report.html.palette import PALETTE
from shoal.tools.report.reader import Reader, read_history
from shoal.tools.report.stragglers import Straggler

__all__ = [
    "LABELS",
    "PALETTE",
    "PARTS",
    "SHOWN",
    "Array",
    "Attempt",
    "Event",
    "Finding",
    "History",
    "AttemptProfile",
    "Profile",
    "Reader",
    "GrowingArray",
    "Straggler",
    "TrafficTotal",
    "BottleneckReport",
    "find_bottleneck",
    "profile",
    "read_history",
]
