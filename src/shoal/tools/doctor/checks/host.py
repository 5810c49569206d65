"""Check cores, memory and limits of each host, as its ranks may use them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TypedDict

import psutil

from shoal.distributed import env_vars
from shoal.tools.doctor.findings import CheckResult, RankFacts, by_host, by_rank, failure, ok, warning
from shoal.util.differences import spans
from shoal.util.units import counted, size


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


SHARED = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
GIB = 2**30
UNLIMITED = -1
_FILES = 1024
_FILES_OF_A_RANK = 16


class Cores(TypedDict):
    """The logical processors that a rank may use, and other limits on its CPU time."""

    affinity: list[int]
    total: int
    quota: float | None
    threads: str


class HostMemory(TypedDict):
    """The memory of the host, in bytes; `ceiling` is the cgroup's limit."""

    total: int
    available: int
    ceiling: int | None


class ProcessLimits(TypedDict):
    """Limits of the process: -1 is unlimited. The size of /dev/shm in bytes, None without one."""

    files: int
    most_files: int
    locked: int
    shared: int | None
    shared_free: int
    infiniband: bool
    size: int


def describe_cores() -> Cores:
    """Return the cores that this process may use."""
    quota, _ = own_limits()
    return Cores(
        affinity=sorted(os.sched_getaffinity(0)),
        total=psutil.cpu_count() or 1,
        quota=quota,
        threads=env_vars.variable(env_vars.THREADS),
    )


def describe_memory() -> HostMemory:
    """Return the memory of this host."""
    found = psutil.virtual_memory()
    _, ceiling = own_limits()
    return HostMemory(total=found.total, available=found.available, ceiling=ceiling)


def describe_limits(ranks: int) -> ProcessLimits:
    """Return the limits of this process, which is one of `ranks`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shared = os.statvfs(SHARED) if SHARED.is_dir() else None
    return ProcessLimits(
        files=soft,
        most_files=hard,
        locked=locked,
        shared=None if shared is None else shared.f_blocks * shared.f_frsize,
        shared_free=0 if shared is None else shared.f_bavail * shared.f_frsize,
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        size=ranks,
    )


@by_host
def check_cores(ranks: Sequence[RankFacts[Cores]]) -> Iterator[CheckResult]:
    """Yield ranks on the same cores, more threads than cores, limits of CPU time."""
    usable = sorted({cpu for one in ranks for cpu in one.facts["affinity"]})
    total, count = ranks[0].facts["total"], len(ranks)
    cores, together = counted(len(usable), "core"), counted(count, "rank")
    crowded = [one for one in ranks if _own(one, ranks) < 1]
    fewer = "start fewer ranks on that host, or request more cores (srun --cpus-per-task=N)"
    if count > len(usable) and len(usable) < total:
        yield failure(
            "cores",
            f"{together} on {cores} ({spans(usable)}) while {total - len(usable)} others may be idle",
            "use srun --cpu-bind=cores --cpus-per-task=N, or mpirun --bind-to none",
        )
    elif count > len(usable):
        yield warning("cores", f"{together} on {cores}: they take turns", fewer)
    elif crowded:
        yield failure(
            "cores",
            f"ranks {spans([one.rank for one in crowded])} share cores while others may be idle",
            "use srun --cpu-bind=cores, or mpirun --bind-to none",
        )
    else:
        each = min(len(one.facts["affinity"]) for one in ranks)
        whose = f", {each} or more in the affinity of each" if count > 1 else ""
        yield ok("cores", f"{cores} of {total} for {together}{whose}")
    yield from _judge_time(ranks, usable)


def _own(one: RankFacts[Cores], ranks: Sequence[RankFacts[Cores]]) -> float:
    """Return the number of a rank's cores, counting cores of several ranks in part."""
    mine = set(one.facts["affinity"])
    return sum(1 / sum(cpu in other.facts["affinity"] for other in ranks) for cpu in mine)


def _judge_time(ranks: Sequence[RankFacts[Cores]], usable: Sequence[int]) -> Iterator[CheckResult]:
    quota = min((one.facts["quota"] for one in ranks if one.facts["quota"] is not None), default=None)
    if quota is not None and quota < len(usable):
        yield warning(
            "CPU time",
            f"the cgroup allows the time of {quota:g} cores, and there are {len(usable)}: "
            "ranks are throttled within a step",
            "request more CPUs (docker run --cpus, srun --cpus-per-task), or use fewer threads",
        )
    given = [int(one.facts["threads"]) for one in ranks if one.facts["threads"].isdecimal()]
    if len(given) == len(ranks) and max(given) > 1 and sum(given) > len(usable):
        fit = max(1, len(usable) // len(ranks))
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={max(given)} for {len(ranks)} rank(s) on {len(usable)} cores",
            f"export OMP_NUM_THREADS={fit}, or unset it",
        )


@by_host
def check_memory(ranks: Sequence[RankFacts[HostMemory]]) -> Iterator[CheckResult]:
    """Yield memory that is low before training has started."""
    found = ranks[0].facts
    free = min(one.facts["available"] for one in ranks)
    text = f"{_rounded(free)} free of {_rounded(found['total'])}"
    ceiling = found["ceiling"]
    if ceiling is not None and ceiling < found["total"]:
        text += f", {_rounded(ceiling)} by the cgroup"
        free = min(free, ceiling)
    if free < GIB * len(ranks):
        yield warning(
            "memory",
            f"{text}, for {len(ranks)} rank(s)",
            "request more (sbatch --mem=…), or end other processes (ps aux --sort=-rss | head)",
        )
    else:
        yield ok("memory", text)


def _rounded(count: int) -> str:
    # Rounded: hosts of one kind differ by little, and must have one line.
    return f"{count / GIB:.0f} GiB" if count >= 4 * GIB else f"{count / GIB:.1f} GiB"


@by_rank
def check_limits(one: RankFacts[ProcessLimits]) -> Iterator[CheckResult]:
    """Check the limits of open files, locked memory and shared memory."""
    files, most = one.facts["files"], one.facts["most_files"]
    # The first rank is connected to all others, for its store and in each group.
    wanted = max(_FILES, _FILES_OF_A_RANK * one.facts["size"])
    if files not in range(wanted):
        number = "any number" if files == UNLIMITED else f"{files:,}"
        yield ok("open files", f"{number} allowed")
    else:
        able = most == UNLIMITED or most >= wanted
        yield warning(
            "open files",
            f"{files:,} allowed, and {one.facts['size']} ranks may need {wanted:,}",
            f"ulimit -n {wanted}"
            if able
            else f"ask the administrators for a limit (nofile) of {wanted}",
        )
    locked = one.facts["locked"]
    if one.facts["infiniband"] and locked != UNLIMITED:
        yield warning(
            "locked memory",
            f"{size(locked)} allowed; InfiniBand registers buffers in it",
            "ulimit -l unlimited; in Slurm administrators set PropagateResourceLimitsExcept=MEMLOCK",
        )
    else:
        yield ok("locked memory", f"{size(locked)} allowed" if locked != UNLIMITED else "unlimited")
    shared, free = one.facts["shared"], one.facts["shared_free"]
    if shared is None or shared < GIB or free < GIB // 4:
        text = "there is none" if shared is None else f"{size(free)} free of {size(shared)}"
        yield warning(
            str(SHARED),
            f"{text}: workers of a Loader send batches through it, and NCCL communicates through it",
            f"docker run --shm-size=8g; check its contents (ls -lS {SHARED}); or num_workers=0",
        )
    else:
        yield ok(str(SHARED), f"{size(shared)}")
