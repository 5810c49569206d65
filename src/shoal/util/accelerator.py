"""Streams, events and synchronization of a device, by the device module of its type."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes apart from the host, with memory of its own."""
    return device.type not in ("cpu", "meta")


def current() -> tuple[str, Any | None]:
    """Return the type of the accelerator that torch sees on this machine, and its device module.

    None for the module if there is none, or one without streams.
    """
    found = torch.accelerator.current_accelerator()
    module = None if found is None else streams(found)
    if found is None or module is None or not module.is_available():
        return "", None
    return found.type, module


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


def name(device: torch.device) -> str:
    """Return the name of the model of a device, such as "NVIDIA H100"; empty if torch has none."""
    module = streams(device)
    return "" if module is None else str(module.get_device_name(device))


def memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of tensors on a device, now and at the peak; empty where torch doesn't know."""
    module = streams(device)
    if module is None:
        return {}
    return {
        "device_memory": module.memory_allocated(device),
        "device_peak": module.max_memory_allocated(device),
    }


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the default generator of an accelerator, in a list; empty if it has none."""
    module = streams(device)
    return [] if module is None else [module.get_rng_state(device)]


def set_random_state(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Restore what `random_state` returned."""
    for state in states:
        torch.get_device_module(device).set_rng_state(state.cpu(), device)


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the states of the CPU's and of the device's default generator afterwards."""
    if streams(device) is None:
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device.index or 0], device_type=device.type)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; on the CPU that is always so."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)
