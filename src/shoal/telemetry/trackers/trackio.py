"""The Trackio tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.telemetry.trackers.continued import SentSteps, require


@dataclass(frozen=True, kw_only=True)
class Trackio:
    """Tracker that records a run directory as one run of Trackio, over all restarts.

    Trackio keeps runs on this machine, in `TRACKIO_DIR`; view them with `trackio show`. Needs the
    package `trackio`.

    Args:
        project: Name of the Trackio project.
        name: Name of the run, which no other run of the project has. `None`: Trackio chooses one.
            Default: None.
        space_id: Hugging Face Space to which Trackio sends the run. `None`: none. Default: None.

    Examples:
        >>> shoal.Trackio(project="digits", name="a").name
        'a'
    """

    project: str
    name: str | None = None
    space_id: str | None = None

    def open(self, directory: Path, step: int) -> _Trackio:
        """Continue the same run; steps that it already has are not sent twice."""
        require("trackio", "Trackio")
        return _Trackio(self, directory, step)


class _Trackio:
    def __init__(self, options: Trackio, directory: Path, step: int) -> None:
        import trackio

        self._sent = SentSteps(directory / "trackio.json", step)
        self._run = trackio.init(
            project=options.project,
            name=self._sent.id or options.name,
            resume="must" if self._sent.id else "never",
            space_id=options.space_id,
            embed=False,
        )
        self._sent.begin(self._run.name)

    def write(self, values: Mapping[str, float], step: int) -> None:
        if new := self._sent.new(values, step):
            self._run.log(new, step=step)
            self._sent.add(new, step)

    def flush(self) -> None:
        """Do nothing: a thread of Trackio writes values within a second."""

    def saved(self, path: str, step: int) -> None:
        """Do nothing: Trackio keeps no values of a run that change."""

    def close(self) -> None:
        self._run.finish()
