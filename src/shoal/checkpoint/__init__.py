"""Checkpoints that exist whole or not at all, readable at any number of ranks.

Nothing is imported until it is used (PEP 562): what only looks at files needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.checkpoint.agreement import Agreement
    from shoal.checkpoint.aside import Job
    from shoal.checkpoint.fence import Fence, FencedFiles, take_over
    from shoal.checkpoint.lock import Lock
    from shoal.checkpoint.manager import Checkpoints, Loaded, Skipped
    from shoal.checkpoint.state import Tree, compare_names, path_of, present, shapes, some
    from shoal.checkpoint.store import Files

_HOMES = {
    "agreement": ("Agreement",),
    "aside": ("Job",),
    "fence": ("Fence", "FencedFiles", "take_over"),
    "lock": ("Lock",),
    "manager": ("Checkpoints", "Loaded", "Skipped"),
    "state": ("Tree", "compare_names", "path_of", "present", "shapes", "some"),
    "store": ("Files",),
}

__all__ = [
    "Agreement",
    "Checkpoints",
    "Fence",
    "FencedFiles",
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
    "take_over",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"shoal.checkpoint.{home}"), name)
    raise AttributeError(f"module 'shoal.checkpoint' has no attribute {name!r}")
