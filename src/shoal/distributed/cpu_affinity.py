"""Assignment of a machine's cores to its ranks, and the number of threads that follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from shoal.util.decision import GIVEN, Decision

_TOPOLOGY = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def divide(cpus: Iterable[int], processes: int) -> list[set[int]]:
    """Return one set of `cpus` for each of `processes` on a machine.

    The sizes differ by at most one. Threads of one core, and cores of one socket, go to the same
    process if the numbers allow. With more processes than cores, each process gets all cores.
    """
    ordered = sorted(cpus, key=_place)
    if processes > len(ordered):
        return [set(ordered)] * processes
    edges = [len(ordered) * index // processes for index in range(processes + 1)]
    return [set(ordered[a:b]) for a, b in pairwise(edges)]


def near(pci: str, devices: Path = _PCI) -> set[int]:
    """Return the logical CPUs on the NUMA node of a device, by its PCI address; empty if not known."""
    with suppress(OSError, ValueError):
        parts = (devices / pci / "local_cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in part.split("-")] for part in parts]
        return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)}
    return set()


def rearrange(bound: Sequence[Collection[int]], close: Sequence[Collection[int]]) -> list[set[int]]:
    """Return the CPUs of the ranks on a machine, such that each has those near its device, `close`.

    The CPUs to which ranks are `bound` are divided again, in the order of the devices' places, so each
    rank keeps their number, and none is left idle. Nothing changes if ranks share CPUs, or if the
    place of a device is not known.
    """
    own = [set(cpus) for cpus in bound]
    everything = set().union(*own)
    if not all(close) or sum(map(len, own)) > len(everything):
        return own
    order = sorted(range(len(own)), key=lambda rank: min(map(_place, close[rank])))
    shares = dict(zip(order, divide(everything, len(own)), strict=True))
    return [shares[rank] for rank in range(len(own))]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return socket, core and number of a logical CPU, so that threads of one core sort together."""
    place = {"physical_package_id": 0, "core_id": cpu}
    for name in place:
        with suppress(OSError, ValueError):
            place[name] = int((_TOPOLOGY / f"cpu{cpu}/topology/{name}").read_text())
    return place["physical_package_id"], place["core_id"], cpu


def share(
    mine: Collection[int],
    neighbours: Sequence[Collection[int]],
    *,
    pci: str = "",
    near: Collection[int] = (),
) -> Decision[int]:
    """Return the number of cores for one rank, of those in its affinity, `mine`.

    `neighbours` are the affinities of all ranks on the machine, including this one. Cores that several
    ranks may use are split evenly among them. The reason names those `near` the rank's device at
    the PCI address `pci`.
    """
    users = sum(not set(mine).isdisjoint(other) for other in neighbours)
    bound = "bound to this rank only" if users <= 1 else f"split among {users} ranks that may use them"
    if near:
        bound += f", {len(set(mine) & set(near))} of them near its GPU ({pci})"
    elif pci:
        bound += f"; the system does not say which are near its GPU ({pci})"
    return Decision(
        what="cores",
        value=max(1, len(mine) // max(1, users)),
        reason=f"{len(mine)} core(s) in its affinity, {bound}",
    )


def threads(cores: int, *, now: int, variable: str, launcher: str) -> Decision[int]:
    """Return the number of torch's threads for a rank with `cores`; it uses `now`.

    The user sets it by OMP_NUM_THREADS (`variable`, empty if not set), but a 1 under torchrun is
    torchrun's own. Without the variable, torch counts all cores that it may use, including those of
    other ranks. The number is never above `now`, since a script may have chosen fewer.
    """
    value, rejected = now, {}
    if variable == "1" and launcher == "torchrun" and now == 1:
        value, reason = cores, "this rank's cores"
        rejected = {"OMP_NUM_THREADS=1": "torchrun sets it if the user has not"}
    elif variable == str(now):
        by = "set by shoal run or before it" if launcher == "shoal run" else "set before this process"
        reason = f"{GIVEN}: OMP_NUM_THREADS={variable}, {by}"
    elif variable:
        reason = f"{GIVEN}: set in the process"
        rejected = {f"OMP_NUM_THREADS={variable}": "the process has set another number since"}
    elif cores < now:
        value, reason = cores, "this rank's cores; OMP_NUM_THREADS is not set"
        rejected = {str(now): "torch's own number counts the cores of other ranks too"}
    else:
        reason = "torch's own number, at most this rank's cores; OMP_NUM_THREADS is not set"
    return Decision(what="threads", value=value, reason=reason, rejected=rejected)
