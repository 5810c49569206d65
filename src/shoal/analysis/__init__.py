"""What the events of a run say: read as they are written, divided into parts, and judged.

`Reader` reads the files of a run directory, again and again while it runs; `History` holds what was
read; `profile` says what the steps of an attempt were spent on; `judge` gives the verdict.
"""

from __future__ import annotations

from .history import PARTS, Array, Attempt, Event, History, Rows, Traffic
from .judged import Finding, Judged
from .palette import PALETTE
from .profile import LABELS, SHOWN, Profile, profile
from .reading import Reader, read
from .spelling import bandwidth, duration, percent
from .stragglers import Straggler
from .verdict import Verdict, judge

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
    "Rows",
    "Straggler",
    "Traffic",
    "Verdict",
    "bandwidth",
    "duration",
    "judge",
    "percent",
    "profile",
    "read",
]
