"""The MLflow tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.telemetry.trackers.continued import SentSteps, require
from shoal.util.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """Tracker that records a run directory as one run of MLflow, over all restarts.

    The server is the one of `MLFLOW_TRACKING_URI`. Tags of the run name its directory and its latest
    checkpoint. While the run is open it is MLflow's active run, to which `mlflow.log_artifact` and
    others write. Needs the package `mlflow` or `mlflow-skinny`, version 3.

    Args:
        experiment: Name of the MLflow experiment.
        name: Name of the MLflow run. `None`: MLflow chooses one. Default: None.
        system_metrics: Whether MLflow records CPU, memory, network and GPU of rank 0's machine.
            Default: True.

    Examples:
        >>> shoal.MLflow(experiment="digits").system_metrics
        True
    """

    experiment: str
    name: str | None = None
    system_metrics: bool = True

    def open(self, directory: Path, step: int) -> _MLflow:
        """Continue the same MLflow run; steps that it already has are not sent twice."""
        require("mlflow", "MLflow")
        return _MLflow(self, directory, step)


class _MLflow:
    def __init__(self, options: MLflow, directory: Path, step: int) -> None:
        import mlflow

        self._client, note = mlflow, directory / "mlflow.json"
        self._sent = SentSteps(note, step)
        self._client.set_experiment(options.experiment)
        try:
            run = self._client.start_run(
                self._sent.id, run_name=options.name, log_system_metrics=options.system_metrics
            )
        except Exception as error:  # also one that is active, and one of another server
            raise LaunchError(
                given=f"a run tracked by MLflow as {self._sent.id or 'a new run'}",
                found=f"MLflow at {self._client.get_tracking_uri()} does not start it: {error}",
                fix=f"end your own mlflow.start_run, set MLFLOW_TRACKING_URI, or delete {note} to "
                "begin another MLflow run",
            ) from None
        self._sent.begin(run.info.run_id)
        self._client.set_tag("shoal.run_directory", str(directory))

    def write(self, values: Mapping[str, float], step: int) -> None:
        if new := self._sent.new(values, step):
            # The step does not wait for the server.
            self._client.log_metrics(new, step=step, run_id=self._sent.id, synchronous=False)
            self._sent.add(new, step)

    def flush(self) -> None:
        self._client.flush_async_logging()

    def saved(self, path: str, step: int) -> None:
        self._client.set_tag("shoal.checkpoint", path)

    def close(self) -> None:
        self.flush()
        self._client.end_run()
