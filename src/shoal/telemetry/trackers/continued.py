"""The id of a run at a tracker, and the steps that the tracker already has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from shoal.util.errors import LaunchError
from shoal.util.regular_file import replace


class SentSteps:
    """The id of a run at a tracker and the last step sent to it, kept in a file of the run directory.

    A resumed run repeats the steps after its checkpoint with the same numbers. Values that the tracker
    already has are not sent again, so that no curve jumps back or has two values at a step.

    Args:
        note: The file.
        step: The step at which the run resumes, for a run that had no such tracker before.
    """

    def __init__(self, note: Path, step: int) -> None:
        self._note = note
        known = json.loads(note.read_text()) if note.exists() else {}
        self.id: str | None = known.get("id")
        self._sent: int = known.get("sent", step)
        self._names: set[str] = set(known.get("names", ()))

    def begin(self, id: str) -> None:
        """Note the id of the run at the tracker."""
        self.id = id
        self._keep()

    def new(self, values: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the values of a step that have not been sent."""
        if step > self._sent:
            return dict(values)
        return {n: v for n, v in values.items() if step == self._sent and n not in self._names}

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Note that these values have been sent."""
        self._names = {*values} if step > self._sent else self._names | {*values}
        self._sent = step
        self._keep()

    def _keep(self) -> None:
        # A process that is killed here must not leave an incomplete note.
        content = {"id": self.id, "sent": self._sent, "names": sorted(self._names)}
        replace(self._note, json.dumps(content))


def require(package: str, name: str, install: str | None = None) -> None:
    """Raise LaunchError if the package of a tracker is not installed."""
    if find_spec(package) is None:
        raise LaunchError(
            given=f"a run tracked by {name}",
            found=f"the package {package} is not installed",
            fix=f"pip install {install or package}, or remove it from Run(trackers=…)",
        )
