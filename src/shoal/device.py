"""The device on which a rank computes."""

from __future__ import annotations

import socket

import torch

from shoal.errors import LaunchError
from shoal.launchers import Placement


def choose_device(device: str | torch.device | None, placement: Placement) -> torch.device:
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
                return chosen
            if chosen.type != "cuda":
                return torch.empty(1, device=chosen).device
        except (RuntimeError, AssertionError) as error:
            raise LaunchError(
                given=f"device={device!r}",
                found=str(error).splitlines()[0].partition(". ")[0],
                fix="device='cpu', device='cuda', or leave it out",
            ) from None
    if not torch.cuda.is_available():
        if device is None:
            return torch.device("cpu")
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
    return torch.device("cuda", placement.local_rank if visible > 1 else 0)
