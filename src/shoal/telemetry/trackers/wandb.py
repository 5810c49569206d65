"""The Weights & Biases tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.telemetry.trackers.continued import SentSteps, require


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Tracker that records a run directory as one run of Weights & Biases, over all restarts.

    Log in with `wandb login` first. Needs the package `wandb`. If the W&B process is killed, the
    values that it has not written yet (offline up to 32 KiB) are only in the run's events.

    Args:
        project: Name of the W&B project.
        name: Name of the W&B run. `None`: W&B chooses one. Default: None.
        mode: "online", "offline" or "disabled", as in `wandb.init`. `None`: wandb's own default, from
            its settings. Default: None.

    Examples:
        >>> tracker = shoal.WandB(project="digits", mode="offline")
        >>> tracker.project
        'digits'
    """

    project: str
    name: str | None = None
    mode: str | None = None

    def open(self, directory: Path, step: int) -> _WandB:
        """Continue the same W&B run; steps that it already has are not sent twice."""
        require("wandb", "W&B")
        return _WandB(self, directory, step)


class _WandB:
    def __init__(self, options: WandB, directory: Path, step: int) -> None:
        import wandb

        self._sent = SentSteps(directory / "wandb.json", step)
        self._run: Any = wandb.init(
            project=options.project,
            name=options.name,
            mode=options.mode,  # type: ignore[arg-type]
            dir=str(directory),
            id=self._sent.id,
            resume="allow",
        )
        self._sent.begin(str(self._run.id))

    def write(self, values: Mapping[str, float], step: int) -> None:
        if new := self._sent.new(values, step):
            self._run.log(new, step=step)
            self._sent.add(new, step)

    def flush(self) -> None:
        """Do nothing: all values have already been passed to the W&B process."""

    def saved(self, path: str, step: int) -> None:
        self._run.summary["checkpoint"] = path

    def close(self) -> None:
        self._run.finish()
