"""Observation of the files that a script replaces in its directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from shoal.tools.verify.patches import call_before

Written = Callable[[str], None]
CACHES = ("__pycache__", ".lock")
"""Parts of the names of files that ranks may share."""


def observe_written_files(root: str, written: Written) -> None:
    """Call `written` with the path, relative to `root`, of each file that this process replaces.

    A file is replaced if it is opened with truncation, if another file is renamed to its name, or by
    torch's `save`, which writes in C++. Files that are appended to or created exclusively are not.
    """

    def note(path: Any) -> None:
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return  # a file descriptor, or a file that is open already
        if full.startswith(os.path.join(root, "")) and not any(part in full for part in CACHES):
            written(os.path.relpath(full, root))

    def audited(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & os.O_TRUNC and not values[2] & (os.O_APPEND | os.O_EXCL):
            note(values[0])
        elif event == "os.rename":  # os.replace raises it too
            note(values[1])

    sys.addaudithook(audited)
    call_before(torch, "save", lambda obj=None, f=None, *_, **__: note(f))
