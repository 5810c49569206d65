"""Trackers: metrics of a run sent to TensorBoard or W&B, continued after a restart."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shoal.util.errors import LaunchError
from shoal.util.regular_file import replace


class Writer(Protocol):
    """An open tracker, on rank 0 only."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""

    def flush(self) -> None:
        """Pass on all metrics so far: a checkpoint follows, and the run never goes back before it."""

    def close(self) -> None:
        """Pass on the remaining metrics."""


class Tracker(Protocol):
    """Frozen options of a tracker; `open` starts it for a run directory.

    `step` is the step at which the run resumes: later records of an earlier attempt will be repeated.
    """

    def open(self, directory: Path, step: int) -> Writer:
        """Return the writer of a run that resumes at `step`."""


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Tracker that writes TensorBoard event files into `tensorboard/` of the run directory.

    View them with `tensorboard --logdir runs`. Needs the package `tensorboard`. A `Run` without
    `trackers=` uses it if that package is installed.

    Examples:
        >>> trackers = [shoal.TensorBoard()]  # for shoal.Run("runs/a", …, trackers=trackers)
    """

    def open(self, directory: Path, step: int) -> Writer:
        """Continue at `step`; later records of an earlier attempt are hidden."""
        _require("tensorboard", "TensorBoard")
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

    def close(self) -> None:
        self._writer.close()


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

    def open(self, directory: Path, step: int) -> Writer:
        """Continue the same W&B run; steps that it already has are not sent twice."""
        _require("wandb", "W&B")
        return _WandB(self, directory, step)


class _WandB:
    """W&B does not accept a step twice. A resumed run repeats the steps after its checkpoint with the
    same numbers, so they are skipped until it is beyond the last step sent: no curve jumps back."""

    def __init__(self, options: WandB, directory: Path, step: int) -> None:
        import wandb

        self._note = directory / "wandb.json"
        known = json.loads(self._note.read_text()) if self._note.exists() else {}
        self._run: Any = wandb.init(
            project=options.project,
            name=options.name,
            mode=options.mode,  # type: ignore[arg-type]
            dir=str(directory),
            id=known.get("id"),
            resume="allow",
        )
        self.id = str(self._run.id)
        self.sent = int(known.get("sent", step))

    def write(self, values: Mapping[str, float], step: int) -> None:
        if step < self.sent:
            return
        self._run.log(dict(values), step=step)
        if step > self.sent:
            self.sent = step
            # A process that is killed here must not leave an incomplete note.
            replace(self._note, json.dumps({"id": self.id, "sent": step}))

    def flush(self) -> None:
        """Do nothing: all values have already been passed to the W&B process."""

    def close(self) -> None:
        self._run.finish()


def default_trackers() -> tuple[Tracker, ...]:
    """Return TensorBoard if it is installed, else none."""
    return (TensorBoard(),) if find_spec("tensorboard") else ()


def _require(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise LaunchError(
            given=f"a run tracked by {name}",
            found=f"the package {package} is not installed",
            fix=f"pip install {package}, or remove it from Run(trackers=…)",
        )


class Curves:
    """The trackers of one run: opened with the first metric, on rank 0 only."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker], *, first: bool) -> None:
        self._directory = directory
        self._trackers = trackers if first else ()
        self._writers: list[Writer] | None = None
        self.begins = 0
        """The step at which this attempt resumes."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""
        if self._writers is None:
            self._writers = []
            for one in self._trackers:
                with self._left_out(None):
                    self._writers.append(one.open(self._directory, self.begins))
        for writer in [*self._writers]:
            with self._left_out(writer):
                writer.write(values, step)

    def flush(self) -> None:
        """Pass on all metrics so far."""
        for writer in [*(self._writers or ())]:
            with self._left_out(writer):
                writer.flush()

    def close(self) -> None:
        """Close the open trackers; closing twice is allowed."""
        for writer in self._writers or ():
            with self._left_out(None):
                writer.close()
        self._writers = []

    @contextmanager
    def _left_out(self, writer: Writer | None) -> Iterator[None]:
        """Drop a tracker if the disk is full: the run continues without it."""
        try:
            yield
        except OSError as error:
            warnings.warn(f"tracker stopped, events are still recorded: {error}", stacklevel=4)
            if writer is not None and self._writers is not None:
                self._writers.remove(writer)
