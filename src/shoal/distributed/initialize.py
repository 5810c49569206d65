"""Creation of a world: each decision on the way, as a Decision, and the process group."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shoal._torch.names import note_untested
from shoal.distributed import cpu_affinity, env_vars, interfaces, mpi, objects
from shoal.distributed import rendezvous as meeting
from shoal.distributed.adopted_group import AdoptedGroup, check_group_of_one, find_group, note_formed
from shoal.distributed.cluster_env import Placement
from shoal.distributed.device import (
    MPI,
    RankDevice,
    backends,
    choose_backend,
    choose_device,
    neighbours,
    why_shared,
)
from shoal.distributed.layout import Layout
from shoal.distributed.passing_faults import RENDEZVOUS, note_cause
from shoal.distributed.virtual_ranks import VirtualRanks, choose_virtual_ranks
from shoal.util import accelerator
from shoal.util.arguments import is_number
from shoal.util.decision import GIVEN, Decision
from shoal.util.differences import spans
from shoal.util.errors import LaunchError, LayoutError

LAYOUT = "replicate=-1"
_BITS = "exact='bits': {} virtual ranks, 1 thread per rank, deterministic algorithms"
TIMEOUT, PREPARE_TIMEOUT = 600.0, 3600.0
LONGEST = 365 * 86400.0
"""Longest time limit in seconds; torch has no infinite one."""


@dataclass(frozen=True, kw_only=True)
class JoinedWorld:
    """A process in its world: its placement, the layout, and the decisions about them.

    `told` is the line that rank 0 prints about it; empty elsewhere. `host` is the address by which
    other ranks reach this one. `variables` are the environment variables that were set, for the
    backends and for scripts. `store` is the ranks' common store, None for a single process. `kept` are
    the process groups that existed before, with their time limits.
    """

    placement: Placement
    layout: Layout
    device: torch.device
    devices: tuple[torch.device, ...]
    group: dist.ProcessGroup | None
    choices: tuple[Decision[object], ...]
    told: str
    host: str = "127.0.0.1"
    variables: Mapping[str, str] = field(default_factory=dict)
    virtual_ranks: VirtualRanks | None = None
    store: Store | None = None
    kept: Mapping[dist.ProcessGroup, timedelta | None] = field(default_factory=dict)


def join(
    *,
    layout: str | Layout,
    backend: str | None,
    device: str | torch.device | None,
    devices_per_rank: int,
    timeout: float,
    prepare_timeout: float,
    virtual_ranks: int | None = None,
    alone: bool = False,
) -> JoinedWorld:
    """Join the process group that a launcher started; see `shoal.init` for the arguments."""
    existing = find_group()
    placement = _place(existing, alone=alone)
    division = choose_layout(layout, placement.size)
    limits = check_limits(timeout, prepare_timeout, existing)
    virtual, numbers = choose_virtual_ranks(division.value, placement.rank, virtual_ranks)
    store = None if existing is None else existing.store
    if placement.unsettled:  # the device depends on the local rank, which ranks exchange
        store = store or _meet(placement, prepare_timeout)
        placement = _settle(placement, store, prepare_timeout)
    assigned = None if existing is None else existing.assigned
    place = choose_device(device, placement, devices_per_rank, assigned)
    accelerator.select(place.value)
    if store is None and placement.size > 1:
        store = _meet(placement, prepare_timeout)
    means = _choose_backend(backend, existing, placement, place.value, store, prepare_timeout)
    group, told = None, placement.warning if placement.size == 1 else ""
    way: interfaces.ChosenInterface | None = None
    written: dict[str, str] = {}
    variable, now = env_vars.variable(env_vars.THREADS), torch.get_num_threads()
    if store is None:
        count = _choose_threads(placement, now, variable, virtual)
    else:
        name = means.value
        if name == MPI and existing is None:
            name, stands_on = mpi.serve(placement)
            means = dataclasses.replace(means, reason=f"{means.reason}; {stands_on}")
        way, written = _choose_way(placement, store, name, prepare_timeout)
        group = _form(placement, store, backends(name, place.value), prepare_timeout)
        placement, machines = _share_machine(placement, place.value, group)
        count = _choose_threads(placement, now, variable, virtual)
        if placement.rank == 0:
            told = _tell(placement, machines, count.value, variable)
            told += "".join(f"; {name}={value}" for name, value in written.items())
    host = "127.0.0.1" if way is None else way.address
    if existing is None:
        written |= env_vars.write_defaults(meeting.variables_of_tasks(placement, store, host))
    unused = "" if device is not None or alone else _unused(placement, place.value, devices_per_rank)
    untested = note_untested(torch.__version__)
    return JoinedWorld(
        placement=placement,
        layout=division.value,
        device=place.value,
        devices=neighbours(place.value, devices_per_rank),
        group=group,
        choices=(
            *placement.choices,
            *([] if way is None else [way.choice]),
            *(count, place, means, division, limits, *numbers),
            *([] if untested is None else [untested]),
        ),
        told="" if placement.rank else _join_notes(told, unused, virtual, untested),
        host=host,
        variables=written,
        virtual_ranks=virtual,
        store=store,
        kept={} if existing is None else existing.kept,
    )


def _place(existing: AdoptedGroup | None, *, alone: bool) -> Placement:
    """Return the placement of this process. Raises LaunchError if it must not form a world."""
    if existing is not None:
        return env_vars.adopted_placement(existing.rank, existing.size)
    placement = env_vars.placement()
    if placement.launcher == "none" and not alone:
        hint = env_vars.warn_alone()
        placement = dataclasses.replace(placement, warning=placement.warning or hint)
    check_group_of_one(placement)
    return placement


def choose_layout(layout: str | Layout, size: int) -> Decision[Layout]:
    """Return the given layout, resolved for `size` ranks. Raises LayoutError if it does not fit."""
    if not isinstance(layout, str | Layout):
        raise LayoutError(
            given=f"layout={layout!r}",
            found=f"a {type(layout).__name__}, not a string or a Layout",
            fix=f"pass layout={LAYOUT!r}",
        )
    parsed = Layout.parse(layout) if isinstance(layout, str) else layout
    resolved = parsed.resolve(size)
    reason = GIVEN if parsed == resolved else f"{GIVEN}: {parsed}, on {size} process(es)"
    if parsed == Layout.parse(LAYOUT):
        reason = f"{parsed}, the default: each of {size} process(es) has a full copy of the model"
    return Decision(what="layout", value=resolved, reason=reason)


def check_limits(
    timeout: float, prepare_timeout: float, existing: AdoptedGroup | None = None
) -> Decision[tuple[float, float]]:
    """Return the time limits in seconds, of a step and before the first one. Raises LaunchError."""
    if not all(is_number(limit) and 0 < limit <= LONGEST for limit in (timeout, prepare_timeout)):
        raise LaunchError(
            given=f"timeout={timeout!r}, prepare_timeout={prepare_timeout!r}",
            found="a time limit is a positive number of seconds, at most one year",
            fix="pass timeout=600, prepare_timeout=3600",
        )
    limits = (timeout, prepare_timeout)
    reason = "the default" if limits == (TIMEOUT, PREPARE_TIMEOUT) else GIVEN
    reason += f": {timeout:g} s for a collective, {prepare_timeout:g} s before the first step"
    if existing is not None:
        reason += f"; {existing.limit}"
    return Decision(what="time limits", value=limits, reason=reason)


_WORLDS = itertools.count()
"""Numbers of this process's worlds: the launcher's store outlives them, with their addresses."""


def _meet(placement: Placement, timeout: float) -> Store:
    """Return the store of this world, which all its ranks can reach."""
    address = _address(placement)
    rank, size, met = placement.rank, placement.size, placement.meeting
    with _explained(placement):
        store = (
            next(rendezvous(address, rank, size, timeout=timedelta(seconds=timeout)))[0]
            if met is None
            else meeting.meet(met, rank=rank, size=size, timeout=timeout)
        )
    return PrefixStore(f"shoal/world/{next(_WORLDS)}", store)


def _settle(placement: Placement, store: Store, timeout: float) -> Placement:
    """Return the placement of this rank, now that ranks can exchange the machines they are on."""
    mine = [interfaces.machine(), placement.local_rank]
    everyone = _exchange(placement, "place", mine, store, timeout)
    machines, local_ranks = zip(*everyone, strict=True)
    return placement.settled(machines, local_ranks)


def _exchange(
    placement: Placement, what: str, mine: list[Any], store: Store, timeout: float
) -> list[list[Any]]:
    """Return the JSON lists of all ranks, in rank order. Collective."""
    keys = [f"{what}/{rank}" for rank in range(placement.size)]
    with _explained(placement):
        store.set(keys[placement.rank], json.dumps(mine))
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError:  # DistStoreError is one; stores in files and in memory raise no other
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                raise
            raise _absent(placement, missing, timeout) from None
        return [json.loads(each) for each in store.multi_get(keys)]


def _choose_backend(
    backend: str | None,
    existing: AdoptedGroup | None,
    placement: Placement,
    device: torch.device,
    store: Store | None,
    timeout: float,
) -> Decision[str]:
    """Return the backend: the given one, that of the existing group, or one for all. Collective."""
    if existing is not None:
        return existing.choose_backend(backend, device)
    if store is None or backend is not None:
        return choose_backend(backend, device)
    everyone = _exchange(placement, "device", list(RankDevice.of(device)), store, timeout)
    return choose_backend(None, device, why_shared([RankDevice(*each) for each in everyone]))


def _absent(placement: Placement, ranks: Sequence[int], timeout: float) -> LaunchError:
    late = LaunchError(
        given=f"rank {placement.rank} of {placement.size} ({placement.launcher}) waits for others",
        found=f"rank {spans(ranks)} did not join the rendezvous within {timeout:g} s",
        fix="check that every rank has started and calls shoal.init, and read the missing rank's error "
        "message",
    )
    return note_cause(late, RENDEZVOUS)


def _choose_way(
    placement: Placement, store: Store, backend: str, timeout: float
) -> tuple[interfaces.ChosenInterface | None, dict[str, str]]:
    """Return the interface between ranks of several machines, and the variables for the backends."""
    given = env_vars.variable(env_vars.GLOO)
    if placement.nodes == 1:
        interfaces.check_given(given)
        return None, {}
    rank, size = placement.rank, placement.size
    with _explained(placement):
        way = interfaces.agree(store, rank=rank, size=size, given=given, timeout=timeout)
    return way, env_vars.write_defaults(interfaces.engine_variables(way.choice.value, backend))


def _form(placement: Placement, store: Store, backend: str, timeout: float) -> dist.ProcessGroup:
    """Return the group of all ranks: the default group, or a second one if there is one already."""
    limit = timedelta(seconds=timeout)
    with _explained(placement):
        if dist.is_initialized():
            return note_formed(dist.new_group(backend=backend, timeout=limit))
        rank, size = placement.rank, placement.size
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return note_formed(dist.group.WORLD)


def _address(placement: Placement) -> str:
    host = f"[{placement.address}]" if ":" in placement.address else placement.address
    return f"tcp://{host}:{placement.port}"


@contextmanager
def _explained(placement: Placement) -> Iterator[None]:
    """Raise LaunchError in place of torch's errors if ranks can't join the rendezvous."""
    at = f" at {_address(placement)}" if placement.address else ""
    try:
        yield
    except (dist.DistError, RuntimeError, ValueError) as error:
        in_use = "EADDRINUSE" in str(error)
        explained = LaunchError(
            given=f"rank {placement.rank} of {placement.size}{at} ({placement.launcher})",
            found=f"port {placement.port} is in use" if in_use else str(error).splitlines()[0],
            fix="export MASTER_PORT=N with a free port N (ss -ltn lists those in use)"
            if in_use
            else "check that the launcher started every rank, and that rank 0's host can be reached: "
            f"ping {placement.address or 'HOST'}",
        )
        late = isinstance(error, dist.DistError) and not in_use
        raise note_cause(explained, RENDEZVOUS if late else "") from None


def _share_machine(
    placement: Placement, device: torch.device, group: dist.ProcessGroup
) -> tuple[Placement, int]:
    """Return the placement with the cores of this rank, and the number of machines.

    A rank of `shoal run`, which binds ranks to cores, is bound to those near its device.
    """
    host, pci = socket.gethostname(), RankDevice.of(device).pci
    mine = (host, sorted(os.sched_getaffinity(0)), sorted(cpu_affinity.near(pci)))
    everyone: list[tuple[str, list[int], list[int]]] = objects.gather(mine, group)
    machines = list(dict.fromkeys(host for host, _, _ in everyone))
    if placement.launcher != "srun":  # Slurm sets the number of cores per task
        here = [rank for rank, (name, _, _) in enumerate(everyone) if name == host]
        bound = [set(everyone[rank][1]) for rank in here]
        if placement.launcher == "shoal run":
            bound = cpu_affinity.rearrange(bound, [everyone[rank][2] for rank in here])
        own = bound[here.index(placement.rank)]
        if own != set(mine[1]):
            os.sched_setaffinity(0, own)
        placement = placement.with_cores(cpu_affinity.share(own, bound, pci=pci, near=mine[2]))
    return placement, len(machines)


def _choose_threads(
    placement: Placement, now: int, variable: str, virtual: VirtualRanks | None
) -> Decision[int]:
    """Return the number of torch's threads, and set it."""
    if virtual is not None:
        count = Decision(
            what="threads",
            value=1,
            reason="exact='bits': kernels sum in another order with another number of threads",
        )
    elif placement.size == 1:
        return Decision(
            what="threads", value=now, reason="torch's own number, which is kept for a single process"
        )
    else:
        count = cpu_affinity.threads(
            placement.cores, now=now, variable=variable, launcher=placement.launcher
        )
    torch.set_num_threads(count.value)
    return count


def _unused(placement: Placement, device: torch.device, per_rank: int) -> str:
    """Return a hint if more GPUs are visible on this machine than its ranks use."""
    used = placement.local_size * per_rank
    visible = accelerator.count() if accelerator.is_accelerator(device) else used
    if used >= visible:
        return ""
    return f"{used} of {visible} visible GPUs in use: `shoal run -n {visible // per_rank}` uses all"


def _join_notes(
    told: str, unused: str, virtual: VirtualRanks | None, untested: Decision[object] | None
) -> str:
    bits = _BITS.format(virtual.total) if virtual else ""
    version = f"torch {untested.value} is {untested.reason}" if untested else ""
    return "; ".join(filter(None, (told, unused, bits, version)))


def _tell(placement: Placement, machines: int, threads: int, variable: str) -> str:
    """Return one line about the ranks, the cores and OMP_NUM_THREADS (`variable`)."""
    nodes = "1 node" if machines == 1 else f"{machines} nodes"
    told = f"world size {placement.size} on {nodes}, launched by {placement.launcher}; "
    told += f"rank 0: {placement.cores} core(s), {threads} thread(s)"
    if variable and placement.launcher != "shoal run":
        told += f", OMP_NUM_THREADS={variable}"
        told += " replaced" if str(threads) != variable else ""
    return f"{told}; {placement.warning}" if placement.warning else told
