"""The numbers of attempts at a run: an old attempt can't change checkpoints after a newer one started.

A machine may lose its network or be suspended, so that its ranks don't know that others continued
without them. A lock does not reach such a machine, and a lease would depend on its clock. Each
attempt therefore writes the next number into a directory next to the checkpoints, and looks for
higher numbers before each operation that changes a checkpoint. Exclusive creation of a file is atomic
on network file systems too (open(2), O_EXCL), and opening a directory makes them ask the server
again. Other file systems may not support exclusive creation; it is enough that listing a directory
shows all earlier files.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shoal.checkpoint.collective_errors import Agreement, Ranks
from shoal.checkpoint.filesystem import Files
from shoal.checkpoint.lock import Lock
from shoal.checkpoint.object_store import RemotePath
from shoal.checkpoint.paths import AnyPath, open_file
from shoal.util.clock import CLOCK, local_time
from shoal.util.errors import CheckpointError
from shoal.util.regular_file import LINK, refused

_KEPT = 10
_LONGEST = 10_000

SEEN_SECONDS = 60.0
"""The time for which a network file system may show an outdated directory."""


@dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """The process that started an attempt, and when; empty and 0 if that can't be read."""

    number: int
    host: str = ""
    process: int = 0
    when: float = 0.0

    def __str__(self) -> str:
        if not self.host:
            return f"attempt {self.number}"
        began = local_time(self.when)
        return f"attempt {self.number}, process {self.process} on {self.host} since {began}"


class Fence:
    """The numbered attempts at one run: a file `N.json` for each in `directory`.

    All ranks of an attempt have the same number. On file systems of fsspec the file is `N-T.json` with
    a random string T. `number` is this attempt's number; 0 until it is known, and until then the fence
    keeps no attempt out.
    """

    def __init__(self, directory: AnyPath) -> None:
        self._directory = directory
        self._mine = ""
        self._own: AnyPath | None = None
        self.number = 0

    def take(self) -> int:
        """Take the next number, on one rank, and with it the run from all earlier attempts.

        Raises OSError if the directory can't be written.
        """
        number = self.newest() + 1
        while not self._claim(number):
            number += 1  # another attempt starts at the same moment; the higher number wins
        for _, old in self._taken()[:-_KEPT]:
            with suppress(OSError):
                old.unlink()
        return number

    def mark(self) -> str:
        """Return the string that this rank wrote when it took the number; empty on other ranks."""
        return self._mine

    def look_for(self, number: int, mark: str, within: float) -> None:
        """Use the number that another rank has taken, once this rank sees the string that it wrote.

        Raises CheckpointError if it does not see the string within `within` seconds: each rank would
        save its part in a different place.
        """
        until = CLOCK.now() + within
        while not any(_read(path) == mark for each, path in self._taken() if each == number):
            if CLOCK.now() > until:
                raise CheckpointError(
                    given=f"a Run in {self._directory.parent} on {socket.gethostname()}",
                    found=f"attempt {number}, which rank 0 has just written to it, is missing: the "
                    "ranks have different paths, or each machine has its own directory of this name",
                    fix="use the same path on all ranks (without the time or a process id in it), "
                    "on a file system that all machines share",
                )
            CLOCK.sleep(0.05)
        self.number = number

    def newest(self) -> int:
        """Return the highest number taken; 0 if there is none."""
        return max((number for number, _ in self._taken()), default=0)

    def check(self) -> None:
        """Raise CheckpointError if a later attempt has taken the run over."""
        taken = self._taken()
        newest = taken[-1][0] if taken else 0
        if self.number and (newest > self.number or self._is_anothers(taken)):
            raise CheckpointError(
                given=f"checkpoints in {self._directory.parent}, by attempt {self.number}",
                found=f"{self._who(newest)}, has taken over: a save by attempt {self.number} would "
                "be lost or would damage the newer attempt's checkpoints",
                fix="end this process; the newer attempt resumes from the latest complete checkpoint",
            )

    def _claim(self, number: int) -> bool:
        """Take a number; False if another attempt has it, or takes it at this moment."""
        mine = {"host": socket.gethostname(), "process": os.getpid(), "when": CLOCK.wall()}
        self._mine = json.dumps(mine)
        text = self._mine.encode()
        if isinstance(self._directory, RemotePath):
            return self._claim_there(self._directory, number, text)
        if self._directory.is_symlink():
            raise refused(self._directory, LINK)
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{number}.json"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "wb") as stream:
            stream.write(text)
        self._own = path
        return True

    def _claim_there(self, directory: RemotePath, number: int, text: bytes) -> bool:
        # Of two that write before they list, the second sees the first. An attempt that sees
        # another one leaves the number, so two never keep the same.
        path = directory / f"{number}-{secrets.token_hex(8)}.json"
        with path.create() as file:
            file.write(text)
            file.finish()
        if [each for each, _ in self._taken()].count(number) == 1:
            self._own = path
            return True
        path.unlink()
        return False

    def _is_anothers(self, taken: list[tuple[int, AnyPath]]) -> bool:
        """Return whether the run directory was removed and created again, with numbers from 1.

        Only the rank that took the number knows; it is the one that commits.
        """
        if self._own is None or not taken:
            return False
        if self._own.name not in [path.name for _, path in taken]:
            return True  # only others' files are there; this one is removed after higher numbers only
        # Remote names are unique. A local file that is empty is being written.
        return isinstance(self._own, Path) and _read(self._own) not in (self._mine, "")

    def _who(self, number: int) -> AttemptStart:
        texts = [_read(path) for each, path in self._taken() if each == number]
        # It may not have been written yet.
        with suppress(ValueError, TypeError, IndexError):
            return AttemptStart(number=number, **json.loads(texts[0]))
        return AttemptStart(number=number)

    def _taken(self) -> list[tuple[int, AnyPath]]:
        """Return the numbers with their files, in order."""
        # A directory that was removed, as from scratch, has no later attempt.
        with suppress(FileNotFoundError):
            named = [(path.name.removesuffix(".json"), path) for path in self._directory.iterdir()]
            split = [(stem.partition("-")[0], path) for stem, path in named]
            found = [(int(number), path) for number, path in split if number.isdecimal()]
            return sorted(found, key=lambda each: each[0])
        return []


def _read(path: AnyPath) -> str:
    """Return the string that an attempt wrote; empty if it can't be read."""
    with suppress(OSError), open_file(path) as file:
        return file.read(_LONGEST).decode(errors="replace")
    return ""


class FencedFiles(Files):
    """File operations that each check the fence first.

    An attempt that was taken over therefore neither commits nor renames nor removes, even if it was in
    the middle of an operation. It may still write to its open files: they have been removed, or only
    this attempt uses them.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @property
    def attempt(self) -> int:
        """See Files."""
        return self._fence.number

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        self._fence.check()
        try:
            yield
        except OSError:
            # The newer attempt may have removed a file: report that as the reason.
            self._fence.check()
            raise

    def make_directory(self, path: AnyPath) -> None:
        """See Files."""
        with self._guarded():
            super().make_directory(path)

    def create(self, path: AnyPath) -> BinaryIO:
        """See Files."""
        with self._guarded():
            return super().create(path)

    def sync(self, file: BinaryIO) -> None:
        """See Files."""
        with self._guarded():
            super().sync(file)

    def sync_directory(self, path: AnyPath) -> None:
        """See Files."""
        with self._guarded():
            super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """See Files."""
        with self._guarded():
            super().rename(source, target)

    def unlink(self, path: AnyPath) -> None:
        """See Files."""
        with self._guarded():
            super().unlink(path)

    def remove_directory(self, path: AnyPath) -> None:
        """See Files."""
        with self._guarded():
            super().remove_directory(path)


def take_over(directory: Path, fence: Fence, world: Ranks, *, job: str, attempt: int) -> Lock | None:
    """Take over the run in `directory`, so that no other run uses it and no older attempt harms it.

    `job` and `attempt` are those of the launcher. Rank 0 holds the lock. Collective; raises
    CheckpointError.
    """

    def take() -> tuple[Lock, int] | None:
        if world.rank:
            return None
        return Lock(directory / "lock", job=job, attempt=attempt, size=world.size), fence.take()

    given = f"a Run in {directory}"
    agreement = Agreement(world)
    taken = agreement.together(given, take)
    first = None if taken is None else (taken[1], fence.mark(), str(directory))
    number, mark, there = world.broadcast(first)
    within = SEEN_SECONDS if str(directory) == there else 0.0
    agreement.together(given, lambda: fence.look_for(number, mark, within))
    return None if taken is None else taken[0]
