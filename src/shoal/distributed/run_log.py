"""The connection between a world and the run that is open in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from shoal.util.errors import LaunchError

Record = Callable[[Mapping[str, Any]], None]


class RunLog:
    """The connection to the run that was opened last, if one is open: its log and its directory.

    Runs that were opened before it are held by weak references, since a script may never close them.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._record: Record | None = None
        self._earlier: list[tuple[WeakMethod[Record], Path]] = []
        self._newest: dict[str, WeakMethod[Record]] = {}

    @property
    def attached(self) -> bool:
        """Whether a run is open."""
        return self._record is not None

    def attach(self, record: Record, directory: Path) -> None:
        """Send values to `record` from now on, the method of a run in `directory`."""
        if self._record is not None and self.directory is not None:
            self._earlier.append((WeakMethod(self._record), self.directory))
        self._record, self.directory = record, directory
        self._newest[os.path.realpath(directory)] = WeakMethod(record)

    def is_newest(self, record: Record, directory: Path) -> bool:
        """Return whether no run was opened in the directory after the one with this method."""
        newest = self._newest.get(os.path.realpath(directory))
        return newest is None or newest() == record

    def detach(self, record: Record) -> None:
        """Disconnect from the run with this method, which is closed, and return to the one before."""
        self._earlier = [each for each in self._earlier if each[0]() not in (record, None)]
        if self._record == record:
            self._record = self.directory = None
            if self._earlier:
                reference, self.directory = self._earlier.pop()
                self._record = reference()

    def write(self, values: Mapping[str, Any]) -> None:
        """Record `values` with the open run. Raises LaunchError if there is none."""
        if self._record is None:
            raise LaunchError(
                given="world.log(…)",
                found="no Run is open that could record it",
                fix="call it inside a Run: with shoal.Run('runs/a', step, loader) as run: …",
            )
        self._record(values)
