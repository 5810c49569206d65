"""The names of checkpoints' directories.

A save fills `step-8.partial` and renames it to `step-8`; a removal renames that to `step-8.trash`.
On file systems without renames the name is `step-8.a3` for attempt 3, and `step-8.a3.2` if that
attempt saved the same step for the second time: no two saves ever write to the same name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.checkpoint.paths import AnyPath

PARTIAL, TRASH = ".partial", ".trash"

_NUMBER = r"(0|[1-9]\d{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}(?:(\.partial|\.trash)|\.a{_NUMBER}(?:\.{_NUMBER})?)?", re.ASCII)


class DirectoryName(NamedTuple):
    """The name of a directory. A name that compares greater was saved later, as far as names show."""

    step: int
    attempt: int = -1
    """The attempt at the run; -1 if the name has none."""
    take: int = 0
    """The number of the attempt's save of this step."""
    suffix: str = ""

    def __str__(self) -> str:
        attempt = f".a{self.attempt}" if self.numbered else ""
        take = f".{self.take}" if self.take > 1 else ""
        return f"step-{self.step}{attempt}{take}{self.suffix}"

    @property
    def numbered(self) -> bool:
        """True if the name is final from the first file on."""
        return self.attempt >= 0

    @staticmethod
    def read(text: str) -> DirectoryName | None:
        """Return the name that prints as `text`; None if `text` is not the name of a checkpoint."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        step, suffix, attempt, take = match.groups()
        if attempt is None:
            return DirectoryName(int(step), suffix=suffix or "")
        name = DirectoryName(int(step), int(attempt), int(take or 1))
        return name if str(name) == text else None


def is_named(path: AnyPath) -> bool:
    """Return whether a path has the name of a checkpoint, or of an unfinished save or removal."""
    return DirectoryName.read(path.name) is not None


def step_of(path: AnyPath) -> int:
    """Return the step in the name of a checkpoint's directory."""
    name = DirectoryName.read(path.name)
    if name is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return name.step
