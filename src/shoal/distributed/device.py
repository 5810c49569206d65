"""Choice of the device of a rank, and of the backends of its process groups."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shoal._torch.modes import default_device
from shoal.distributed import mpi
from shoal.distributed.cluster_env import Placement
from shoal.util import accelerator
from shoal.util.arguments import check_integer
from shoal.util.decision import GIVEN, Decision
from shoal.util.errors import LaunchError


class RankDevice(NamedTuple):
    """The device of a rank, as other ranks compare it with theirs.

    `uuid` is that of a GPU, or of a slice of one (MIG). Slices of one GPU have the same address `pci`.
    Both are empty if unknown, and for the CPU.
    """

    host: str
    type: str
    uuid: str
    pci: str

    @classmethod
    def of(cls, device: torch.device) -> RankDevice:
        """Return the device of this process."""
        uuid = pci = ""
        if device.type != "cpu":
            module = torch.get_device_module(device)
            properties: Any = getattr(module, "get_device_properties", lambda _: None)(device)
            uuid = str(getattr(properties, "uuid", ""))
            if hasattr(properties, "pci_bus_id"):
                domain, unit = properties.pci_domain_id, properties.pci_device_id
                pci = f"{domain:04x}:{properties.pci_bus_id:02x}:{unit:02x}.0"
        return cls(socket.gethostname(), device.type, uuid, pci)


def choose_device(
    device: str | torch.device | None,
    placement: Placement,
    count: int = 1,
    assigned: tuple[torch.device, str] | None = None,
) -> Decision[torch.device]:
    """Return the device of this rank, or the first if it has several.

    It is `device` if given, else the one that was `assigned`, as by a call or a variable, else the one
    that the script has set in torch before, else the visible GPU with the number of the local rank,
    else the CPU.
    A type without a number, such as "cuda", is the GPU of the local rank too; with `count` devices per
    rank, it is the first of them. If each task sees only `count` GPUs, these are its devices for any
    local rank.
    """
    check_integer(LaunchError, "shoal.init", "devices_per_rank", count, 1)
    kind, by, given = accelerator.current()[0] or "cuda", GIVEN, f"device={str(device)!r}"
    cpu = "pass device='cpu'"
    if device is None:
        device, given = assigned or _set_before()
        by = f"assigned by {given}" if assigned else f"the script has called {given}"
        cpu = "torch.set_default_device('cpu')"
    elif (default := default_device()) is not None:
        _check_default(default, device, given)
    if device is not None:
        try:
            chosen = torch.device(device)
            kind = chosen.type
            if accelerator.streams(chosen) is None:
                return _given(torch.empty(1, device=chosen).device, by)
            if chosen.index is not None:
                visible = torch.get_device_module(kind).device_count()
                if chosen.index + count > visible:
                    last = f" for {count}" if count > 1 else ""
                    raise RuntimeError(f"no such GPU{last}: {visible} visible, numbered from 0")
                return _given(chosen, by)
        except (RuntimeError, AssertionError) as error:
            raise LaunchError(
                given=given,
                found=str(error).splitlines()[0].partition(". ")[0],
                fix=f"{cpu}, choose a device that exists, or leave it out",
            ) from None
    module = torch.get_device_module(kind)
    if not module.is_available():
        if device is None:
            return Decision(
                what="device",
                value=torch.device("cpu"),
                reason="no GPU is visible",
                rejected={"cuda": _why_no_gpu()},
            )
        raise LaunchError(
            given=given,
            found=f"torch {torch.__version__} sees no {'GPU' if kind == 'cuda' else kind + ' device'} "
            f"on {socket.gethostname()}",
            fix=f"{cpu}, or ask the scheduler for GPUs and check with nvidia-smi",
        )
    visible = module.device_count()
    if visible < count or (visible > count and (placement.local_rank + 1) * count > visible):
        each = f" with {count} devices each" if count > 1 else ""
        raise LaunchError(
            given=f"{placement.local_size} processes{each} on {socket.gethostname()}",
            found=f"{visible} visible GPUs, none for local rank {placement.local_rank}",
            fix=f"start {visible // count} processes per machine, or use shoal.init(device='cpu')"
            if visible >= count
            else f"use devices_per_rank={visible}, or shoal.init(device='cpu')",
        )
    reason = f"local rank {placement.local_rank}, {visible} visible GPUs"
    if visible == count:
        own = "only visible GPU" if count == 1 else f"first of {count} visible GPUs, all for this rank"
        reason = f"the {own}; so its local rank, {placement.local_rank}, does not matter"
    return Decision(
        what="device",
        value=torch.device(kind, placement.local_rank * count if visible > count else 0),
        reason=reason if device is None else f"{by}: {device}; {reason}",
        rejected={"cpu": "a GPU is visible"} if device is None else {},
    )


def neighbours(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return the devices of a rank: `device` and the GPUs after it, or `device` repeated."""
    if accelerator.streams(device) is None:
        return (device,) * count
    return tuple(torch.device(device.type, device.index + number) for number in range(count))


def _given(device: torch.device, by: str) -> Decision[torch.device]:
    return Decision(what="device", value=device, reason=by)


def _set_before() -> tuple[torch.device | None, str]:
    """Return the device that the script has set in torch, and the call; None if it has set none.

    Raises LaunchError for a device without values.
    """
    default = default_device()
    if default is not None:
        call = f"torch.set_default_device({str(default)!r})"
        if default.type == "meta":
            raise LaunchError(
                given=f"shoal.init() after {call}",
                found="tensors on the device meta have no values, so ranks can't train with them",
                fix="torch.set_default_device(None) before shoal.init(); create only the model under "
                "`with torch.device('meta'):`",
            )
        return default, call
    kind, module = accelerator.current()
    # Not asked otherwise, since that would initialize it.
    if module is not None and module.is_initialized() and (number := module.current_device()):
        return torch.device(kind, number), f"torch.{kind}.set_device({number})"
    return None, ""


def _check_default(default: torch.device, device: str | torch.device, given: str) -> None:
    """Raise LaunchError if torch creates tensors on another device than the one that was given."""
    with suppress(RuntimeError):  # no such device is an error that follows
        own = torch.device(device)
        same = own.type == default.type and None in (own.index, default.index)
        if default.type != "cpu" and own != default and not same:
            raise LaunchError(
                given=f"{given} after torch.set_default_device({str(default)!r})",
                found=f"torch would create tensors on {default}, and the rank would train on {own}",
                fix=f"torch.set_default_device({str(own)!r}) before shoal.init(), or leave one out",
            )


def _why_no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    if not built:
        return f"torch {torch.__version__} is built for the CPU only"
    return f"torch {torch.__version__}, built for {built}, sees none on {socket.gethostname()}"


MPI = "mpi"


def choose_backend(backend: str | None, device: torch.device, lacking: str = "") -> Decision[str]:
    """Return the backend: the given one, else by the device. Raises LaunchError if torch lacks it.

    `lacking` is the reason why the backend of the device can't be used; empty if it can.
    """
    if backend == MPI:
        mpi.require(device)
        return Decision(what="backend", value=MPI, reason=GIVEN)
    own = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    if backend is not None:
        choice = Decision(what="backend", value=backend, reason=GIVEN)
    elif lacking:
        choice = Decision(
            what="backend",
            value="gloo",
            reason=lacking,
            rejected={own: "it needs one GPU per rank"},
        )
    elif own != "gloo":
        choice = Decision(
            what="backend",
            value=own,
            reason=f"the device is {'a GPU' if device.type == 'cuda' else device.type}",
            rejected={"gloo": "it copies tensors of a GPU through host memory"},
        )
    else:
        lacks = "" if dist.is_nccl_available() else f"; torch {torch.__version__} is built without it"
        choice = Decision(
            what="backend",
            value="gloo",
            reason=f"the device is {'a CPU' if device.type == 'cpu' else device.type}",
            rejected={"nccl": f"it needs a CUDA device{lacks}"},
        )
    if not dist.is_backend_available(choice.value):
        here = [name for name in ("gloo", "nccl", "xccl") if dist.is_backend_available(name)]
        raise LaunchError(
            given=f"backend={choice.value!r}",
            found=f"torch {torch.__version__} here supports {', '.join(here)}",
            fix="use backend='gloo' or 'mpi' on CPUs, 'nccl' on NVIDIA and AMD GPUs, or leave it out",
        )
    return choice


def why_shared(everyone: Sequence[RankDevice]) -> str:
    """Return why the backend of GPUs can't serve these ranks, in rank order; empty if it can.

    NCCL needs one GPU per rank. It finds slices of one GPU (MIG) by the address on the PCI bus.
    """
    if all(one.type == "cpu" for one in everyone):
        return ""
    units: dict[tuple[str, str], int] = {}
    addresses: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(everyone):
        if one.type == "cpu":
            return f"rank {rank}, on {one.host}, has no GPU"
        other = units.setdefault((one.host, one.uuid or f"rank {rank}"), rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU of {one.host}"
        other = addresses.setdefault((one.host, one.pci or f"rank {rank}"), rank)
        if other != rank:
            return f"ranks {other} and {rank} have slices (MIG) of one GPU of {one.host}"
    return ""


def backends(name: str, device: torch.device) -> str:
    """Return what `init_process_group` is given: one backend, or one for the host and one for `device`.

    With both, values of Python and barriers pass through the memory of the host, and neither waits
    for what the device has still to compute.
    """
    return name if device.type == "cpu" or name in ("gloo", MPI) else f"cpu:gloo,{device.type}:{name}"


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend through which a group sends tensors of `device`."""
    given = str(dist.get_backend(group))
    parts = dict(part.split(":") for part in given.split(",")) if ":" in given else {}
    return parts.get(device.type, given)
