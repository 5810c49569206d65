"""The names of checkpoints' directories.

`step-8` is one that a rename has made; `step-8.partial` and `step-8.trash` are before and after that.
Where nothing can be renamed it is `step-8.a3`, saved by attempt 3, and `step-8.a3.2` if that attempt
saved the same step for the second time: no two saves ever write to the same name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.checkpoint.paths import AnyPath

PARTIAL, TRASH = ".partial", ".trash"

_NUMBER = r"(0|[1-9]\d{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}(?:(\.partial|\.trash)|\.a{_NUMBER}(?:\.{_NUMBER})?)?", re.ASCII)


class Name(NamedTuple):
    """The name of a directory. Of two, the greater one was saved later, as far as names tell."""

    step: int
    attempt: int = -1
    """Of the run; -1 where the name has none."""
    take: int = 0
    """Which of the attempt's saves of this step."""
    suffix: str = ""

    def __str__(self) -> str:
        attempt = f".a{self.attempt}" if self.numbered else ""
        take = f".{self.take}" if self.take > 1 else ""
        return f"step-{self.step}{attempt}{take}{self.suffix}"

    @property
    def numbered(self) -> bool:
        """Whether it is the name for good, from the first file on."""
        return self.attempt >= 0

    @staticmethod
    def read(text: str) -> Name | None:
        """The name that prints as `text`; None for what no checkpoint is called."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        step, suffix, attempt, take = match.groups()
        if attempt is None:
            return Name(int(step), suffix=suffix or "")
        name = Name(int(step), int(attempt), int(take or 1))
        return name if str(name) == text else None


def is_named(path: AnyPath) -> bool:
    """Whether a path has the name of a checkpoint, or of what a save or a removal left."""
    return Name.read(path.name) is not None


def step_of(path: AnyPath) -> int:
    """The step in the name of a checkpoint's directory."""
    name = Name.read(path.name)
    if name is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return name.step
