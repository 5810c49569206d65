"""A live page of a run directory in a terminal.

`snapshot_builder` reads events into a snapshot, `layout` draws a snapshot as lines, `terminal` shows
them.
"""

from __future__ import annotations

from shoal.tools.report.dashboard.terminal import watch

__all__ = ["watch"]
