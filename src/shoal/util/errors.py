"""The one hierarchy of errors: each says what was given, what was found and what to type."""

from __future__ import annotations

from shoal.util.text import printable


class ShoalError(Exception):
    """An error that a user can act on.

    `given` is what the user wrote or did, `found` is what contradicts it, `fix` is what to type.
    `where` (rank, host, file:line) is filled in by whoever knows it, at the latest when the error
    leaves the world's `with` block. Printed as three or four lines.
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
        # The first line of a traceback carries the class name; start below it so that columns align.
        # What was found may be text of a file that somebody else wrote.
        shown = (printable(line) for text in lines for line in text.split("\n"))
        return "\n" + "\n".join(shown)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default reduction, and errors cross processes.
        return _rebuild, (type(self), self.given, self.found, self.fix, self.where)


def _rebuild(kind: type[ShoalError], given: str, found: str, fix: str, where: str | None) -> ShoalError:
    error = kind(given=given, found=found, fix=fix)
    error.where = where
    return error


class LaunchError(ShoalError):
    """Processes, ports, launchers and their environment."""


class LayoutError(ShoalError):
    """A layout that can't be read or does not fit the world."""


class DataError(ShoalError):
    """Datasets, batches and their sizes."""


class StepError(ShoalError):
    """Losses, gradients, precision and the order of calls in a step."""


class CheckpointError(ShoalError):
    """Run directories and checkpoints that can't be written, read or trusted."""


class AgreementError(ShoalError):
    """Ranks that should hold the same value and don't."""
