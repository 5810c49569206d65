"""A live page of a run directory in a terminal.

`observing` reads events into a snapshot, `page` draws a snapshot as lines, `screen` shows them.
"""

from __future__ import annotations

from shoal.report.dashboard.terminal import watch

__all__ = ["watch"]
