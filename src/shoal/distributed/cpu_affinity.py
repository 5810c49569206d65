"""The cores of a machine divided among its ranks, and the threads that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from shoal.util.decision import GIVEN, Decision

_TOPOLOGY = Path("/sys/devices/system/cpu")


def divide(cpus: Iterable[int], processes: int) -> list[set[int]]:
    """One share of `cpus` for each of `processes` of a machine; neighbours stay together.

    Shares differ by one at most. Threads of one core, and cores of one socket, fall to the same
    process where the numbers allow. With more processes than cores all share all.
    """
    ordered = sorted(cpus, key=_place)
    if processes > len(ordered):
        return [set(ordered)] * processes
    edges = [len(ordered) * index // processes for index in range(processes + 1)]
    return [set(ordered[a:b]) for a, b in pairwise(edges)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Socket, core and number of a logical processor: threads of one core follow each other."""
    place = {"physical_package_id": 0, "core_id": cpu}
    for name in place:
        with suppress(OSError, ValueError):
            place[name] = int((_TOPOLOGY / f"cpu{cpu}/topology/{name}").read_text())
    return place["physical_package_id"], place["core_id"], cpu


def share(mine: Collection[int], neighbours: Sequence[Collection[int]]) -> Decision[int]:
    """How many cores are one rank's own, of those in its affinity, `mine`.

    `neighbours` are the affinities of all ranks of its machine, its own included: what several may
    use is divided among them.
    """
    users = sum(not set(mine).isdisjoint(other) for other in neighbours)
    bound = (
        "bound to this rank alone" if users <= 1 else f"divided among {users} ranks that may use them"
    )
    return Decision(
        what="cores",
        value=max(1, len(mine) // max(1, users)),
        reason=f"{len(mine)} core(s) in its affinity, {bound}",
    )


def threads(cores: int, *, now: int, variable: str, launcher: str) -> Decision[int]:
    """How many threads torch is to use in a rank with `cores`, where it uses `now`.

    OMP_NUM_THREADS (`variable`, empty if not set) is the user's word, but for the 1 that torchrun
    sets by itself. Without it torch counts all cores that it may use, so ranks that share them get
    their share; more than now is never right, since a script may have chosen fewer.
    """
    value, rejected = now, {}
    if variable == "1" and launcher == "torchrun" and now == 1:
        value, reason = cores, "this rank's cores"
        rejected = {"OMP_NUM_THREADS=1": "torchrun sets it by itself where nobody has"}
    elif variable == str(now):
        by = "set by shoal run or before it" if launcher == "shoal run" else "set before this process"
        reason = f"{GIVEN}: OMP_NUM_THREADS={variable}, {by}"
    elif variable:
        reason = f"{GIVEN}: set in the process"
        rejected = {f"OMP_NUM_THREADS={variable}": "something has chosen another number since"}
    elif cores < now:
        value, reason = cores, "this rank's cores; OMP_NUM_THREADS is not set"
        rejected = {str(now): "torch's own number counts the cores of other ranks too"}
    else:
        reason = "as torch has it, not more than this rank's cores; OMP_NUM_THREADS is not set"
    return Decision(what="threads", value=value, reason=reason, rejected=rejected)
