"""Choice of the device of a rank."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import torch

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
    device: str | torch.device | None, placement: Placement, count: int = 1
) -> Decision[torch.device]:
    """Return the device of this rank, or the first if it has several.

    It is `device` if given, else the visible GPU with the number of the local rank, else the CPU.
    A type without a number, such as "cuda", is the GPU of the local rank too; with `count` devices per
    rank, it is the first of them. If each task sees only `count` GPUs, these are its devices for any
    local rank.
    """
    check_integer(LaunchError, "shoal.init", "devices_per_rank", count, 1)
    kind = accelerator.current()[0] or "cuda"
    if device is not None:
        try:
            chosen = torch.device(device)
            kind = chosen.type
            if accelerator.streams(chosen) is None:
                return _given(torch.empty(1, device=chosen).device)
            if chosen.index is not None:
                visible = torch.get_device_module(kind).device_count()
                if chosen.index + count > visible:
                    last = f" for {count}" if count > 1 else ""
                    raise RuntimeError(f"no such GPU{last}: {visible} visible, numbered from 0")
                return _given(chosen)
        except (RuntimeError, AssertionError) as error:
            raise LaunchError(
                given=f"device={device!r}",
                found=str(error).splitlines()[0].partition(". ")[0],
                fix="pass device='cpu', device='cuda', or leave it out",
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
            given=f"device={str(device)!r}",
            found=f"torch {torch.__version__} sees no {'GPU' if kind == 'cuda' else kind + ' device'} "
            f"on {socket.gethostname()}",
            fix="use device='cpu', or ask the scheduler for GPUs and check with nvidia-smi",
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
        reason=reason if device is None else f"{GIVEN}: {device}; {reason}",
        rejected={"cpu": "a GPU is visible"} if device is None else {},
    )


def neighbours(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """Return the devices of a rank: `device` and the GPUs after it, or `device` repeated."""
    if accelerator.streams(device) is None:
        return (device,) * count
    return tuple(torch.device(device.type, device.index + number) for number in range(count))


def _given(device: torch.device) -> Decision[torch.device]:
    return Decision(what="device", value=device, reason=GIVEN)


def _why_no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    if not built:
        return f"torch {torch.__version__} is built for the CPU only"
    return f"torch {torch.__version__}, built for {built}, sees none on {socket.gethostname()}"
