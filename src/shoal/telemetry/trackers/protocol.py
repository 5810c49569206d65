"""The interface of trackers, and the trackers of one run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from shoal.telemetry.trackers.tensorboard import default_trackers
from shoal.util.errors import StepError


class Writer(Protocol):
    """An open tracker, on rank 0 only."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""

    def flush(self) -> None:
        """Pass on all metrics so far: a checkpoint follows, and the run never goes back before it."""

    def saved(self, path: str, step: int) -> None:
        """Record that the checkpoint of a step is complete."""

    def close(self) -> None:
        """Pass on the remaining metrics."""


class Tracker(Protocol):
    """Frozen options of a tracker; `open` starts it for a run directory.

    `step` is the step at which the run resumes: later records of an earlier attempt will be repeated.
    """

    def open(self, directory: Path, step: int) -> Writer:
        """Return the writer of a run that resumes at `step`."""


class Curves:
    """The trackers of one run: opened with the first metric, on rank 0 only.

    `None` is TensorBoard if it is installed, else no tracker.
    """

    def __init__(self, directory: Path, trackers: Sequence[Tracker] | None, *, first: bool) -> None:
        self._directory = directory
        chosen = default_trackers() if trackers is None else trackers
        self._trackers = chosen if first else ()
        self._writers: list[Writer] | None = None
        self.begins = 0
        """The step at which this attempt resumes."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""
        if self._writers is None:
            self._writers = []
            for one in self._trackers:
                with self._left_out(None):
                    self._writers.append(_checked(one, one.open(self._directory, self.begins)))
        for writer in [*self._writers]:
            with self._left_out(writer):
                writer.write(values, step)

    def flush(self) -> None:
        """Pass on all metrics so far."""
        for writer in [*(self._writers or ())]:
            with self._left_out(writer):
                writer.flush()

    def saved(self, path: str, step: int) -> None:
        """Record that the checkpoint of a step is complete."""
        for writer in [*(self._writers or ())]:
            with self._left_out(writer):
                writer.saved(path, step)

    def close(self) -> None:
        """Close the open trackers; closing twice is allowed."""
        for writer in self._writers or ():
            with self._left_out(writer):
                writer.close()
        self._writers = []

    @contextmanager
    def _left_out(self, writer: Writer | None) -> Iterator[None]:
        """Drop a tracker that fails, such as on a full disk: the run continues without it.

        When it is opened, other errors than of the operating system are the user's to mend.
        """
        try:
            yield
        except Exception as error:
            if writer is None and not isinstance(error, OSError):
                raise
            reason = f"{type(error).__name__}: {error}"
            name = "tracker" if writer is None else f"tracker {type(writer).__name__}"
            warnings.warn(f"{name} stopped, events are still recorded: {reason}", stacklevel=4)
            if writer is not None and self._writers is not None:
                self._writers = [kept for kept in self._writers if kept is not writer]
                with suppress(Exception):  # keeps what it has buffered
                    writer.close()


def _checked(tracker: Tracker, writer: Writer) -> Writer:
    """Return what a tracker has opened. Raises StepError if it lacks a method."""
    lacking = [name for name in ("write", "flush", "saved", "close") if not hasattr(writer, name)]
    if lacking:
        raise StepError(
            given=f"trackers=[{type(tracker).__name__}()]",
            found=f"its open returned a {type(writer).__name__} without {', '.join(lacking)}",
            fix="return an object with write, flush, saved and close from open, such as self",
        )
    return writer
