"""The TensorBoard tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shoal.telemetry.trackers.continued import require


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Tracker that writes TensorBoard event files into `tensorboard/` of the run directory.

    View them with `tensorboard --logdir runs`. Needs the package `tensorboard`. A `Run` without
    `trackers=` uses it if that package is installed.

    Examples:
        >>> trackers = [shoal.TensorBoard()]  # for shoal.Run("runs/a", …, trackers=trackers)
    """

    def open(self, directory: Path, step: int) -> _TensorBoard:
        """Continue at `step`; later records of an earlier attempt are hidden."""
        require("tensorboard", "TensorBoard")
        return _TensorBoard(directory / "tensorboard", step)


class _TensorBoard:
    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def saved(self, path: str, step: int) -> None:
        """Do nothing: the checkpoints are in the same directory."""

    def close(self) -> None:
        self._writer.close()


def default_trackers() -> tuple[TensorBoard, ...]:
    """Return TensorBoard if it is installed, else none."""
    return (TensorBoard(),) if find_spec("tensorboard") else ()
