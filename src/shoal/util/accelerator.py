"""Streams, events and synchronization of a device, by the device module of its type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes apart from the host, with memory of its own."""
    return device.type not in ("cpu", "meta")


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


class HostCopy:
    """The values of a tensor, copied to the host without waiting for the device."""

    def __init__(self, tensor: Tensor) -> None:
        module = streams(tensor.device)
        # torch pins the host's memory for a copy that is not waited for.
        self._values = tensor.detach().to("cpu", non_blocking=module is not None)
        self._copied = None if module is None else module.Event()
        if self._copied is not None:
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the values are known without waiting. False if the device has failed."""
        try:
            return self._copied is None or bool(self._copied.query())
        except RuntimeError:
            return False

    def read(self) -> list[float]:
        """Return the values, once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._values.tolist()]
