"""The device on which a rank computes."""

from __future__ import annotations

import socket

import torch

from shoal.choice import GIVEN, Choice
from shoal.errors import LaunchError
from shoal.launchers import Placement


def choose_device(device: str | torch.device | None, placement: Placement) -> Choice[torch.device]:
    """The device of this rank: as given, else the visible GPU of its local rank, else the CPU.

    "cuda" without a number is the GPU of the local rank too. Where each task sees one GPU only,
    that one is its device whatever its local rank is.
    """
    if device is not None:
        try:
            chosen = torch.device(device)
            if chosen.type == "cuda" and chosen.index is not None:
                visible = torch.cuda.device_count()
                if chosen.index >= visible:
                    raise RuntimeError(f"no such GPU: {visible} visible, numbered from 0")
                return _given(chosen)
            if chosen.type != "cuda":
                return _given(torch.empty(1, device=chosen).device)
        except (RuntimeError, AssertionError) as error:
            raise LaunchError(
                given=f"device={device!r}",
                found=str(error).splitlines()[0].partition(". ")[0],
                fix="device='cpu', device='cuda', or leave it out",
            ) from None
    if not torch.cuda.is_available():
        if device is None:
            return Choice(
                what="device",
                value=torch.device("cpu"),
                reason="no GPU is visible",
                rejected={"cuda": _why_no_gpu()},
            )
        raise LaunchError(
            given=f"device={str(device)!r}",
            found=f"torch {torch.__version__} sees no GPU on {socket.gethostname()}",
            fix="device='cpu', or ask the scheduler for GPUs and check with nvidia-smi",
        )
    visible = torch.cuda.device_count()
    if visible > 1 and placement.local_rank >= visible:
        raise LaunchError(
            given=f"{placement.local_size} processes on {socket.gethostname()}",
            found=f"{visible} visible GPUs, none for local rank {placement.local_rank}",
            fix=f"start {visible} processes per machine, or shoal.init(device='cpu')",
        )
    reason = f"local rank {placement.local_rank}, {visible} visible GPUs"
    if visible == 1:
        reason = f"the only visible GPU; so its local rank, {placement.local_rank}, does not matter"
    return Choice(
        what="device",
        value=torch.device("cuda", placement.local_rank if visible > 1 else 0),
        reason=reason if device is None else f"{GIVEN}: {device}; {reason}",
        rejected={"cpu": "a GPU is visible"} if device is None else {},
    )


def _given(device: torch.device) -> Choice[torch.device]:
    return Choice(what="device", value=device, reason=GIVEN)


def _why_no_gpu() -> str:
    built = torch.version.cuda or torch.version.hip
    if not built:
        return f"torch {torch.__version__} is built for the CPU only"
    return f"torch {torch.__version__}, built for {built}, sees none on {socket.gethostname()}"
