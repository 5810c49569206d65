"""The hierarchy of errors; each has the input, the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from shoal.util.safe_text import printable


class ShoalError(Exception):
    """An error with a fix for the user, printed as three or four lines.

    `given` is the user's input or action, `found` contradicts it, `fix` is the text to type. `where`
    (rank, host, file:line) is set by the code that knows it, at the latest when the error leaves the
    world's `with` block.
    """

    def __init__(self, *, given: str, found: str, fix: str) -> None:
        super().__init__(given, found, fix)
        self.given = given
        self.found = found
        self.fix = fix
        self.where: str | None = None

    def __str__(self) -> str:
        lines = [f"given: {self.given}", f"found: {self.found}", f"fix:   {self.fix}"]
        if self.where is not None:
            lines.append(f"where: {self.where}")
        # The first line of a traceback has the class name; start below it so that columns align.
        # `found` may quote a file that another user wrote.
        shown = (printable(line) for text in lines for line in text.split("\n"))
        return "\n" + "\n".join(shown)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default reduction, and errors cross processes.
        return partial(type(self), **self.texts), (), {"where": self.where}

    @property
    def texts(self) -> dict[str, str]:
        """The arguments of an equal error, as JSON can hold them."""
        return {"given": self.given, "found": self.found, "fix": self.fix}


@contextmanager
def raised_as(
    kind: type[ShoalError],
    *,
    given: str,
    fix: str,
    errors: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> Iterator[None]:
    """Convert errors of a block, such as those of the file system, to a ShoalError with their text."""
    try:
        yield
    except errors as error:
        raise kind(given=given, found=str(error), fix=fix) from None


class LaunchError(ShoalError):
    """An error of processes, ports, launchers or their environment."""


class LayoutError(ShoalError):
    """An error of a layout that can't be parsed or does not fit the world."""


class DataError(ShoalError):
    """An error of datasets, batches or their sizes."""


class StepError(ShoalError):
    """An error of losses, gradients, precision or the order of calls in a step."""


class CheckpointError(ShoalError):
    """An error of run directories or checkpoints that can't be written, read or trusted."""


class AgreementError(ShoalError):
    """An error of ranks that should have the same value and do not."""


class CorruptionError(ShoalError):
    """An error of memory or arithmetic that changed the state of a run, found by a guard."""
