"""Check that all ranks see the same run directory: rank 0's file, and the lock that it holds."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypedDict

from shoal.tools.doctor.checks.filesystem import nearest_existing
from shoal.tools.doctor.findings import CheckResult, RankFacts, describe_ranks, failure, ok, warning
from shoal.util.clock import CLOCK

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_SECONDS = 0.005
_LATE = 1.0
_TEXT = "seen"


class FileView(TypedDict):
    """When another rank saw rank 0's file, in seconds (-1: never), and whether it saw its lock."""

    seconds: float
    locked: bool


def try_shared_directory(
    directory: Path, store: Store, *, rank: int, size: int, limit: float
) -> FileView:
    """Look for a file on all ranks before rank 0 writes it, and until they see it; collective.

    Shared file systems cache failed lookups, so the early look matters: it also happens with a
    checkpoint that one rank completes and all open.
    """
    if rank == 0:
        try:
            _show(nearest_existing(directory), store, size, limit)
        except OSError:
            store.set("folder", "")
            raise
        return FileView(seconds=0.0, locked=True)
    store.wait(["folder"], timedelta(seconds=limit))
    folder = Path(store.get("folder").decode())
    if folder == Path():
        raise OSError("rank 0 could not write")
    (folder / _TEXT).exists()
    store.set(f"looked/{rank}", "")
    store.wait(["written"], timedelta(seconds=limit))
    seconds = _await(folder / _TEXT, limit)
    view = FileView(seconds=seconds, locked=seconds >= 0 and _is_locked(folder / "lock"))
    store.set(f"done/{rank}", "")
    return view


def _show(directory: Path, store: Store, size: int, limit: float) -> None:
    others = range(1, size)
    trial = TemporaryDirectory(prefix=".shoal-doctor-", dir=directory, ignore_cleanup_errors=True)
    with trial as name, Path(name, "lock").open("w") as lock:
        folder = Path(name)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store.set("folder", str(folder))
        store.wait([f"looked/{rank}" for rank in others], timedelta(seconds=limit))
        (folder / _TEXT).write_text(_TEXT)
        store.set("written", "")
        store.wait([f"done/{rank}" for rank in others], timedelta(seconds=limit))


def _await(path: Path, limit: float) -> float:
    """Return the seconds until the file and its text appear; -1 if that takes over half the time."""
    begun = CLOCK.now()
    while (taken := CLOCK.now() - begun) < limit / 2:
        try:
            if path.read_text() == _TEXT:
                return taken
        except OSError:
            pass
        CLOCK.sleep(_POLL_SECONDS)
    return -1.0


def _is_locked(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False


def check_shared_directory(ranks: Sequence[RankFacts[FileView]]) -> Iterator[CheckResult]:
    """Yield ranks that don't see rank 0's file, see it late, or don't see its lock."""
    blind = [one for one in ranks if one.facts["seconds"] < 0]
    late = [one for one in ranks if one.facts["seconds"] > _LATE]
    if blind:
        yield failure(
            "shared",
            f"{describe_ranks(blind)} did not see what rank 0 ({ranks[0].host}) wrote",
            "use --run with a directory on a file system that all hosts share (df DIR on each)",
        )
    elif late:
        worst = max(late, key=lambda one: one.facts["seconds"])
        yield warning(
            "shared",
            f"{describe_ranks(late)} saw what rank 0 wrote after up to {worst.facts['seconds']:.1f} s",
            "use another file system for runs; NFS: mount with lookupcache=positive or actimeo=1",
        )
    else:
        slowest = max(one.facts["seconds"] for one in ranks)
        yield ok("shared", f"all ranks saw what rank 0 wrote within {max(1, round(1000 * slowest))} ms")
    unlocked = [one for one in ranks if one.facts["seconds"] >= 0 and not one.facts["locked"]]
    if unlocked:
        yield warning(
            "lock",
            f"{describe_ranks(unlocked)} could take a lock that rank 0 ({ranks[0].host}) held: "
            "two runs in one directory would not be detected",
            "mount it with locks (Lustre: -o flock), or never start two runs in one directory",
        )
