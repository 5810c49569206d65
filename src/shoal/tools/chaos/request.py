"""The options of a storm, without an import of torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StormRequest:
    """The script, its ranks, and the faults: a number of them of these kinds, drawn from a seed.

    `limit` is the longest time of one attempt in seconds. With `shrinks`, a storm that fails is
    repeated without single faults until each of them is needed.
    """

    script: str
    args: tuple[str, ...]
    processes: int
    kinds: tuple[str, ...]
    count: int
    seed: int
    limit: float
    shrinks: bool

    @property
    def command(self) -> str:
        """The script and its arguments."""
        return shlex.join((self.script, *self.args))
