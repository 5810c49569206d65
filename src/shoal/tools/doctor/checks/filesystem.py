"""Check the file system of the run directory: operations, speed, and whether all ranks see it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypedDict

from shoal.tools.doctor.findings import (
    CheckResult,
    RankFacts,
    by_rank,
    describe_ranks,
    failure,
    ok,
    warning,
)
from shoal.util.clock import CLOCK
from shoal.util.mounts import mount_of
from shoal.util.units import size

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


GIB = 2**30
_SYNCS = 5
_QUOTA_SECONDS = 3.0
_SLOW_SYNC = 1.0
_FEW_INODES = 1000


class Directory(TypedDict):
    """Results of tests in `folder`, the run directory or the directory in which it will be created.

    `troubles` are the errors of the system, by operation. `sync` is the median time in seconds until
    4 kB are on the disk; -1 if nothing could be written.
    """

    folder: str
    kind: str
    troubles: dict[str, str]
    sync: float
    free: int
    total: int
    inodes: int
    quota: str


def nearest_existing(directory: Path) -> Path:
    """Return the directory, or the nearest existing one above it, in which it would be created.

    Raises NotADirectoryError if a file is in the way.
    """
    path = directory.absolute()
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if nearest.is_dir():
        return nearest
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))


def try_directory(directory: Path) -> Directory:
    """Try the operations of a Run in a temporary folder."""
    folder = nearest_existing(directory)
    found = os.statvfs(folder)
    troubles: dict[str, str] = {}
    syncs: list[float] = []
    trial = folder / f".shoal-doctor-{secrets.token_hex(8)}"
    try:
        if _try(troubles, "write", trial.mkdir):
            _try(troubles, "write", lambda: syncs.extend(_syncs(trial)))
            _try(troubles, "rename", lambda: _rename(trial))
            _try(troubles, "lock", lambda: _lock(trial / "lock"))
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return Directory(
        folder=str(folder),
        kind=mount_of(folder)[0],
        troubles=troubles,
        sync=statistics.median(syncs) if syncs else -1.0,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else _FEW_INODES,
        quota=_over_quota(),
    )


def _try(troubles: dict[str, str], what: str, act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError as error:
        troubles[what] = error.strerror or str(error)
        return False
    return True


def _syncs(folder: Path) -> Iterator[float]:
    for number in range(_SYNCS):
        begun = CLOCK.now()
        with (folder / f"sync-{number}").open("wb") as file:
            file.write(secrets.token_bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        yield CLOCK.now() - begun


def _rename(folder: Path) -> None:
    """Rename as a checkpoint commit does: a folder to a new name, and a file over another."""
    before, after = folder / "a.partial", folder / "a"
    before.mkdir()
    for name, text in (("old", "old"), ("new", "new")):
        (before / name).write_text(text)
    os.rename(before, after)
    os.replace(after / "new", after / "old")
    if sorted(path.name for path in after.iterdir()) != ["old"] or (after / "old").read_text() != "new":
        raise OSError(0, "a name shows other contents after the rename")


def _lock(path: Path) -> None:
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _over_quota() -> str:
    """Return the output of quota(1) on exceeded limits; empty if none is exceeded or it is unknown."""
    program = shutil.which("quota")
    if program is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "-q"], capture_output=True, text=True, timeout=_QUOTA_SECONDS, check=False
        )
        return " ".join(done.stdout.split())
    return ""


def check_directories(ranks: Sequence[RankFacts[Directory]]) -> Iterator[CheckResult]:
    """Yield the permissions of each rank there, the speed, and the free space."""
    yield from _check_rights(ranks)
    able = [one for one in ranks if one.facts["sync"] >= 0]
    slow = [one for one in able if one.facts["sync"] > _SLOW_SYNC]
    if slow:
        worst = max(slow, key=lambda one: one.facts["sync"])
        yield warning(
            "sync",
            f"{worst.facts['sync']:.1f} s until 4 kB are on the disk, on {describe_ranks([worst])}",
            "use another file system for runs, such as the site's scratch or work",
        )
    elif able:
        yield ok("sync", f"{1000 * max(one.facts['sync'] for one in able):.1f} ms at most for 4 kB")
    sized = [one for one in able if one.facts["total"]]
    if sized:
        yield from _check_room([min(sized, key=lambda one: one.facts["free"])])


@by_rank
def _check_rights(one: RankFacts[Directory]) -> Iterator[CheckResult]:
    found = one.facts
    troubles, folder = found["troubles"], f"{found['folder']} ({found['kind']})"
    if "write" in troubles:
        yield failure(
            "run directory",
            f"{folder} can't be written: {troubles['write']}",
            f"check ls -ld {found['folder']} and df -h {found['folder']}, or use another --run DIR",
        )
        return
    if "rename" in troubles:
        yield warning(
            "rename",
            f"failed in {folder}: {troubles['rename']}; only the manifest marks a complete checkpoint",
            "use another file system for runs, if there is one",
        )
    if "lock" in troubles:
        yield warning(
            "lock",
            f"failed in {folder}: {troubles['lock']}; two runs in one directory would not be detected",
            "mount it with locks (Lustre: -o flock), or never start two runs in one directory",
        )
    if not troubles:
        yield ok("run directory", f"{folder}: written, renamed and locked")


@by_rank
def _check_room(one: RankFacts[Directory]) -> Iterator[CheckResult]:
    found = one.facts
    text = f"{size(found['free'])} free of {size(found['total'])} for {found['folder']}"
    fix = f"run df -h {found['folder']} and quota -s; remove old runs, or use another --run"
    if found["free"] < GIB // 16:
        yield failure("room", text, fix)
    elif found["free"] < 5 * GIB or found["inodes"] < _FEW_INODES:
        few = f", and for {found['inodes']} more files" if found["inodes"] < _FEW_INODES else ""
        yield warning("room", text + few, fix)
    else:
        yield ok("room", text)
    if found["quota"]:
        yield warning(
            "quota",
            f"quota(1) says: {found['quota']}",
            "check quota -s, and remove files",
        )


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
