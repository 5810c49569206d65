"""Curves for people: numbers of a run handed to TensorBoard or W&B, continued after a restart."""

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
    """An open tracker, on rank 0 alone."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""

    def flush(self) -> None:
        """Hand over everything so far: a checkpoint follows, behind which a run never goes back."""

    def close(self) -> None:
        """Hand over what is left."""


class Tracker(Protocol):
    """Frozen options of a tracker; `open` brings it to life for a run's directory.

    `step` is where the run goes on: what was recorded beyond it will be recorded again.
    """

    def open(self, directory: Path, step: int) -> Writer:
        """The writer of a run that goes on at `step`."""


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Event files in `tensorboard/` of the run directory: `tensorboard --logdir runs`."""

    def open(self, directory: Path, step: int) -> Writer:
        """Go on at `step`; what an earlier attempt recorded beyond it is hidden."""
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
    """One run of Weights & Biases for one run directory, however often it is started.

    `mode` is wandb's own: "online", "offline" or "disabled". The key comes from `wandb login`. What a
    process of W&B's holds back when all is killed (offline up to 32 KiB) is in the run's events only.
    """

    project: str
    name: str | None = None
    mode: str | None = None

    def open(self, directory: Path, step: int) -> Writer:
        """Go on in the same W&B run; steps that it has already are not sent twice."""
        _require("wandb", "W&B")
        return _WandB(self, directory, step)


class _WandB:
    """W&B takes no step twice. A resumed run repeats the steps after its checkpoint with the same
    numbers, so they are left out until it is beyond what was sent: no curve jumps back."""

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
            # A process that is killed here must not leave half a note.
            replace(self._note, json.dumps({"id": self.id, "sent": step}))

    def flush(self) -> None:
        """Nothing is kept here; the process of W&B has it."""

    def close(self) -> None:
        self._run.finish()


def default_trackers() -> tuple[Tracker, ...]:
    """TensorBoard where it is installed, else none."""
    return (TensorBoard(),) if find_spec("tensorboard") else ()


def _require(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise LaunchError(
            given=f"a run tracked by {name}",
            found=f"the package {package} is not installed",
            fix=f"pip install {package}, or leave it out of Run(trackers=…)",
        )


class Curves:
    """The trackers of one run: opened with the first number, on rank 0; nothing elsewhere."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker], *, first: bool) -> None:
        self._directory = directory
        self._trackers = trackers if first else ()
        self._writers: list[Writer] | None = None
        self.begins = 0
        """The step at which this attempt goes on."""

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
        """Hand over everything so far."""
        for writer in [*(self._writers or ())]:
            with self._left_out(writer):
                writer.flush()

    def close(self) -> None:
        """Close what was opened; closing twice is fine."""
        for writer in self._writers or ():
            with self._left_out(None):
                writer.close()
        self._writers = []

    @contextmanager
    def _left_out(self, writer: Writer | None) -> Iterator[None]:
        """A full disk does not end a run, of which only rank 0 has curves: it goes on without."""
        try:
            yield
        except OSError as error:
            warnings.warn(f"curves end here, the events go on: {error}", stacklevel=4)
            if writer is not None and self._writers is not None:
                self._writers.remove(writer)
