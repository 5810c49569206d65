"""The limits that control groups set on a process; cgroups(7)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def own_limits() -> tuple[float | None, int | None]:
    """Return the tightest limits on this process, in cores and in bytes of memory; None without one."""
    member = Path("/proc/self/cgroup")
    return cgroup_limits(member.read_text() if member.exists() else "", Path("/sys/fs/cgroup"))


def cgroup_limits(membership: str, root: Path) -> tuple[float | None, int | None]:
    """Return the tightest limits on a process, in cores and in bytes of memory; None without one.

    `membership` is the text of its /proc/PID/cgroup. A limit may be at any level, in version 2 (one
    tree) or version 1 (a tree for each controller).
    """
    quotas: list[float] = []
    ceilings: list[int] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        here = PurePosixPath(path.lstrip("/"))
        for level in (here, *here.parents):
            folder = root / controllers / level
            quotas += _quota(_words(folder / "cpu.max"))
            quotas += _quota(
                [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
            )
            for name in ("memory.max", "memory.limit_in_bytes"):
                ceilings += [int(word) for word in _words(folder / name) if word.isdecimal()]
    return min(quotas, default=None), min(ceilings, default=None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _quota(words: list[str]) -> Iterator[float]:
    # No limit is "max" in version 2 and -1 in version 1.
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        yield int(words[0]) / int(words[1])
