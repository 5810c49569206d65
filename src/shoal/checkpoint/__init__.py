"""Atomic checkpoints, readable at any number of ranks.

`Checkpoints` saves and loads state; `inspect` reads files without a process group. Names are imported
when they are first used (PEP 562): code that only reads file names and manifests needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.checkpoint.async_save import BackgroundSave
    from shoal.checkpoint.collective_errors import Agreement
    from shoal.checkpoint.equality import differing, facts
    from shoal.checkpoint.fencing import Fence, FencedFiles, take_over
    from shoal.checkpoint.filesystem import Files
    from shoal.checkpoint.inspect.dcp_reader import DCPReader
    from shoal.checkpoint.lock import Lock
    from shoal.checkpoint.manager import Checkpoints, RestoredCheckpoint, SkippedDirectory
    from shoal.checkpoint.object_store import is_url, masked_url
    from shoal.checkpoint.paths import AnyPath, how_to_remove, lasting, path_from
    from shoal.checkpoint.state_tree import (
        Tree,
        compare_names,
        path_of,
        present,
        shapes,
        some,
        take_apart,
    )

_HOMES = {
    "collective_errors": ("Agreement",),
    "async_save": ("BackgroundSave",),
    "equality": ("differing", "facts"),
    "fencing": ("Fence", "FencedFiles", "take_over"),
    "filesystem": ("Files",),
    "inspect.dcp_reader": ("DCPReader",),
    "lock": ("Lock",),
    "manager": ("Checkpoints", "RestoredCheckpoint", "SkippedDirectory"),
    "paths": ("AnyPath", "how_to_remove", "lasting", "path_from"),
    "object_store": ("is_url", "masked_url"),
    "state_tree": ("Tree", "compare_names", "path_of", "present", "shapes", "some", "take_apart"),
}

__all__ = [
    "Agreement",
    "AnyPath",
    "Checkpoints",
    "DCPReader",
    "Fence",
    "FencedFiles",
    "Files",
    "BackgroundSave",
    "RestoredCheckpoint",
    "Lock",
    "SkippedDirectory",
    "Tree",
    "compare_names",
    "differing",
    "facts",
    "how_to_remove",
    "is_url",
    "lasting",
    "masked_url",
    "path_from",
    "path_of",
    "present",
    "shapes",
    "some",
    "take_apart",
    "take_over",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"shoal.checkpoint.{home}"), name)
    raise AttributeError(f"module 'shoal.checkpoint' has no attribute {name!r}")
