"""Check the file system of the run directory: operations that checkpoints need, and its speed."""

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
from pathlib import Path
from typing import TypedDict

import psutil

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
from shoal.util.units import size

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
        kind=_kind(folder),
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


def _kind(folder: Path) -> str:
    """Return the kind of the file system, as in the list of mounts."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    real = folder.resolve()
    return next((mounts[one] for one in (real, *real.parents) if one in mounts), "unknown")


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
