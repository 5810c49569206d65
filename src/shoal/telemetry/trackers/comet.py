"""The Comet tracker."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.telemetry.trackers.continued import SentSteps, require


@dataclass(frozen=True, kw_only=True)
class Comet:
    """Tracker that records a run directory as one experiment of Comet, over all restarts.

    Log in with `comet login` first. Needs the package `comet_ml`.

    Args:
        project: Name of the Comet project.
        name: Name of the experiment. `None`: Comet chooses one. Default: None.
        offline: Whether to write archives into `comet/` of the run directory, one for each attempt,
            for `comet upload`. A killed attempt leaves none. Default: False.

    Examples:
        >>> shoal.Comet(project="digits", offline=True).project
        'digits'
    """

    project: str
    name: str | None = None
    offline: bool = False

    def open(self, directory: Path, step: int) -> _Comet:
        """Continue the same experiment; steps that it already has are not sent twice."""
        require("comet_ml", "Comet")
        return _Comet(self, directory, step)


class _Comet:
    def __init__(self, options: Comet, directory: Path, step: int) -> None:
        import comet_ml

        self._sent = SentSteps(directory / "comet.json", step)
        key = self._sent.id or uuid.uuid4().hex
        archives = str(directory / "comet") if options.offline else None
        self._experiment = comet_ml.start(
            project_name=options.project,
            experiment_key=key,
            mode="get_or_create",
            online=not options.offline,
            experiment_config=comet_ml.ExperimentConfig(
                name=options.name, offline_directory=archives, auto_metric_logging=False
            ),
        )
        self._sent.begin(key)

    def write(self, values: Mapping[str, float], step: int) -> None:
        if new := self._sent.new(values, step):
            self._experiment.log_metrics(new, step=step)
            self._sent.add(new, step)

    def flush(self) -> None:
        self._experiment.flush()

    def saved(self, path: str, step: int) -> None:
        self._experiment.log_other("checkpoint", path)

    def close(self) -> None:
        self._experiment.end()
