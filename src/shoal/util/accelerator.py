"""Streams, events and synchronization of a device, by the device module of its type."""

from __future__ import annotations

from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes apart from the host, with memory of its own."""
    return device.type not in ("cpu", "meta")


def select(device: torch.device) -> None:
    """Make a device the current one of its type; the CPU and Apple's GPU are always current."""
    if is_accelerator(device):
        choose = getattr(torch.get_device_module(device), "set_device", None)
        if choose is not None:
            choose(device)


def streams(device: torch.device) -> Any | None:
    """Return the module with the streams and events of a device, such as `torch.cuda`.

    None for a device without streams: the CPU, Apple's GPUs.
    """
    if not is_accelerator(device):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; on the CPU that is always so."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)
