"""Checkpoints that exist whole or not at all, readable at any number of ranks."""

from __future__ import annotations

from shoal.checkpoint.agreement import Agreement
from shoal.checkpoint.aside import Job
from shoal.checkpoint.lock import Lock
from shoal.checkpoint.manager import Checkpoints, Loaded, Skipped
from shoal.checkpoint.state import Tree, compare_names, path_of, present, shapes, some
from shoal.checkpoint.store import Files

__all__ = [
    "Agreement",
    "Checkpoints",
    "Files",
    "Job",
    "Loaded",
    "Lock",
    "Skipped",
    "Tree",
    "compare_names",
    "path_of",
    "present",
    "shapes",
    "some",
]
