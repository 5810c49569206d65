"""What the events of a run say: read as they are written, divided into parts, and judged.

`Reader` reads the files of a run directory, again and again while it runs; `History` holds what was
read; `profile` says what the steps of an attempt were spent on; `find_bottleneck` gives the verdict.
"""

from __future__ import annotations

from shoal.report.bottleneck import BottleneckReport, find_bottleneck
from shoal.report.breakdown import LABELS, SHOWN, Profile, profile
from shoal.report.causes import Finding, Judged
from shoal.report.history import PARTS, Array, Attempt, Event, GrowingArray, History, TrafficTotal
from shoal.report.html.palette import PALETTE
from shoal.report.reader import Reader, read_history
from shoal.report.stragglers import Straggler

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
    "Judged",
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
