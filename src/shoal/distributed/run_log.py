"""The connection between a world and the run that is open in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from shoal.util.errors import LaunchError

Record = Callable[[Mapping[str, Any]], None]


@dataclass
class _OpenRun:
    """A run that is open, and whether another one was opened in its directory later."""

    record: WeakMethod[Record]
    directory: Path
    place: str
    replaced: bool = False


class RunLog:
    """The connection to the run that was opened last, if one is open: its log and its directory.

    Runs that were opened before it are held by weak references, since a script may never close them.
    """

    def __init__(self) -> None:
        self._runs: list[_OpenRun] = []
        self._record: Record | None = None

    @property
    def attached(self) -> bool:
        """Whether a run is open."""
        return self._record is not None

    @property
    def directory(self) -> Path | None:
        """The directory of the run that was opened last, if one is open."""
        runs = self._runs
        return runs[-1].directory if runs else None

    def attach(self, record: Record, directory: Path) -> None:
        """Send values to `record` from now on, the method of a run in `directory`."""
        place = os.path.realpath(directory)
        for each in self._runs:
            each.replaced |= each.place == place
        self._runs.append(_OpenRun(WeakMethod(record), directory, place))
        self._record = record

    def is_newest(self, record: Record) -> bool:
        """Return whether no run was opened in the same directory after the one with this method."""
        return not any(each.replaced and each.record() == record for each in self._runs)

    def detach(self, record: Record) -> None:
        """Disconnect from the run with this method, which is closed, and return to the one before."""
        self._runs = [each for each in self._runs if each.record() not in (record, None)]
        self._record = self._runs[-1].record() if self._runs else None

    def write(self, values: Mapping[str, Any]) -> None:
        """Record `values` with the open run. Raises LaunchError if there is none."""
        if self._record is None:
            raise LaunchError(
                given="world.log(…)",
                found="no Run is open that could record it",
                fix="call it inside a Run: with shoal.Run('runs/a', step, loader) as run: …",
            )
        self._record(values)
