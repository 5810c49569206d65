"""The connection between a world and the run that is open in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.util.errors import LaunchError


class RunLog:
    """The connection to the open run, if there is one: it records values and has its directory."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._record: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def attached(self) -> bool:
        """Whether a run is open."""
        return self._record is not None

    def attach(self, record: Callable[[Mapping[str, Any]], None], directory: Path) -> None:
        """Send values to `record` from now on, the method of a run in `directory`."""
        self._record, self.directory = record, directory

    def detach(self) -> None:
        """Disconnect from the run, which is closed."""
        self._record = self.directory = None

    def write(self, values: Mapping[str, Any]) -> None:
        """Record `values` with the open run. Raises LaunchError if there is none."""
        if self._record is None:
            raise LaunchError(
                given="world.log(…)",
                found="no Run is open that could record it",
                fix="with shoal.Run('runs/a', step, loader) as run: …, and world.log inside",
            )
        self._record(values)
