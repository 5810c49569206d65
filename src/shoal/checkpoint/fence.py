"""Attempts at a run, numbered: one that another has taken over changes no checkpoint any more.

A machine may be cut off and live on, or be stopped for a while: its ranks don't know that others
have gone on without them. A lock does not reach it, and a lease would trust its clock. So each
attempt takes the next number in the run directory, and looks for higher ones before each operation
by which it would change a checkpoint. Creating a file that must not exist is atomic on network file
systems too (open(2), O_EXCL), and opening a directory asks their server anew.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shoal.checkpoint.agreement import Agreement, Ranks
from shoal.checkpoint.lock import Lock
from shoal.checkpoint.store import Files
from shoal.errors import CheckpointError

_KEPT = 10

SEEN_SECONDS = 60.0
"""How long a network file system may show a directory as it was before."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Who took an attempt over, and when; empty and 0 where that can't be read."""

    number: int
    host: str = ""
    process: int = 0
    when: float = 0.0

    def __str__(self) -> str:
        if not self.host:
            return f"attempt {self.number}"
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        return f"attempt {self.number}, process {self.process} on {self.host} since {began}"


class Fence:
    """The attempts at one run, a file `N.json` for each in `directory`; all its ranks share a number.

    `number` is this attempt's; 0 until it is known, and nothing is kept out before.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine = ""
        self.number = 0

    def take(self) -> int:
        """Take the next number, on one rank, and with it the run from all attempts before.

        Raises OSError where the directory can't be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        number = self.newest()
        while True:
            number += 1
            try:
                file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue  # another attempt begins at the same moment; the higher number wins
            break
        with os.fdopen(file, "w") as stream:
            mine = {"host": socket.gethostname(), "process": os.getpid(), "when": time.time()}
            self._mine = json.dumps(mine)
            stream.write(self._mine)
        for old in sorted(self._numbers())[:-_KEPT]:
            with suppress(OSError):
                self._path(old).unlink()
        return number

    def mark(self) -> str:
        """What the rank that took the number wrote there; other ranks look for it. Empty on those."""
        return self._mine

    def look_for(self, number: int, mark: str, within: float) -> None:
        """Take over the number that another rank has taken, once this one sees what it wrote.

        Raises CheckpointError where it does not: each would save its part into a place of its own.
        """
        until = time.monotonic() + within
        while not self._shows(number, mark):
            if time.monotonic() > until:
                raise CheckpointError(
                    given=f"a Run in {self._directory.parent} on {socket.gethostname()}",
                    found=f"{self._path(number)}, which rank 0 has just written, is not there: the "
                    "ranks were given different directories, or each machine has its own of this name",
                    fix="give all ranks the same path (without the time or a process's number in it), "
                    "on a file system that all machines share",
                )
            time.sleep(0.05)
        self.number = number

    def _shows(self, number: int, mark: str) -> bool:
        with suppress(OSError):
            return self._path(number).read_text() == mark
        return False

    def newest(self) -> int:
        """The highest number taken; 0 for none."""
        return max(self._numbers(), default=0)

    def check(self) -> None:
        """Raise CheckpointError where a later attempt has taken the run over."""
        newest = self.newest()
        if self.number and (newest > self.number or self._is_anothers(newest)):
            raise CheckpointError(
                given=f"checkpoints in {self._directory.parent}, by attempt {self.number}",
                found=f"{self._who(newest)}, has taken over: what this one saved now would be lost or "
                "spoil the other's",
                fix="end this process; the newer attempt goes on from the last checkpoint",
            )

    def _is_anothers(self, newest: int) -> bool:
        """Whether the run directory was removed and begun anew, where numbers begin at 1 again.

        Only the rank that took the number knows; it is the one that commits.
        """
        if not self._mine or not newest:
            return False
        try:
            return self._path(self.number).read_text() not in (self._mine, "")
        except FileNotFoundError:
            return True  # others' numbers are there, and this one never goes before a higher one

    def _who(self, number: int) -> Taken:
        # It may not have been written yet.
        with suppress(OSError, ValueError, TypeError):
            return Taken(number=number, **json.loads(self._path(number).read_text()))
        return Taken(number=number)

    def _numbers(self) -> list[int]:
        # A directory that is gone, as scratch is purged, holds no later attempt.
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            stems = [entry.name.removesuffix(".json") for entry in entries]
            return [int(stem) for stem in stems if stem.isdecimal()]
        return []

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.json"


class FencedFiles(Files):
    """Operations on the disk, each of them after a look at the fence.

    So an attempt that was taken over neither commits nor renames nor removes, whatever it was in the
    middle of. What it has open it may still write: that has been removed, or is its own.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._fence.check()
        try:
            yield
        except OSError:
            # What the newer attempt has removed is missing: that is the reason to name.
            self._fence.check()
            raise

    def make_directory(self, path: Path) -> None:
        """See Files."""
        with self._guarded():
            super().make_directory(path)

    def create(self, path: Path) -> BinaryIO:
        """See Files."""
        with self._guarded():
            return super().create(path)

    def sync(self, file: BinaryIO) -> None:
        """See Files."""
        with self._guarded():
            super().sync(file)

    def sync_directory(self, path: Path) -> None:
        """See Files."""
        with self._guarded():
            super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        with self._guarded():
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """See Files."""
        with self._guarded():
            super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        """See Files."""
        with self._guarded():
            super().remove_directory(path)


def take_over(directory: Path, fence: Fence, world: Ranks, *, job: str, attempt: int) -> Lock | None:
    """Make sure that no other run is alive in `directory`, and none that is cut off does harm.

    `job` and `attempt` are those of the launcher. The lock is rank 0's. Collective; raises
    CheckpointError.
    """

    def take() -> tuple[Lock, int] | None:
        if world.rank:
            return None
        return Lock(directory / "lock", job=job, attempt=attempt), fence.take()

    given = f"a Run in {directory}"
    agreement = Agreement(world)
    taken = agreement.together(given, take)
    first = None if taken is None else (taken[1], fence.mark(), str(directory))
    number, mark, there = world.broadcast(first)
    within = SEEN_SECONDS if str(directory) == there else 0.0
    agreement.together(given, lambda: fence.look_for(number, mark, within))
    return None if taken is None else taken[0]
