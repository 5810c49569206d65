"""What the events of a run say: read as they are written, divided into parts, and judged.

`Reader` reads the files of a run directory, again and again while it runs; `History` holds what was
read; `profile` says what the steps of an attempt were spent on; `judge` gives the verdict.
"""

from __future__ import annotations

from .history import PARTS, Attempt, History, Rows, Traffic
from .profile import LABELS, SHOWN, Profile, profile
from .reading import Reader
from .stragglers import Straggler
from .verdict import Finding, Verdict, judge

__all__ = [
    "LABELS",
    "PARTS",
    "SHOWN",
    "Attempt",
    "Finding",
    "History",
    "Profile",
    "Reader",
    "Rows",
    "Straggler",
    "Traffic",
    "Verdict",
    "judge",
    "profile",
]
