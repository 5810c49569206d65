"""Streams, events and synchronization of a device, by the device module of its type."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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


def record(device: torch.device) -> Any | None:
    """Return an event of all work that the current stream of a device has been given so far.

    None for a device without streams, which has then done that work.
    """
    module = streams(device)
    if module is None:
        synchronize(device)
        return None
    return module.current_stream(device).record_event()


def pinned(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of host memory that a device can fill in the background.

    On CUDA the memory is of exactly this size. torch's own pinned memory is rounded up to a power of
    two, and is never returned to the system.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    buffer = torch.empty(size, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return buffer


class SideStream:
    """A stream of a device, for work that the computation on it does not wait for.

    On a device without streams the work is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = streams(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run the block on this stream, after all that the current one has been given so far."""
        if self._module is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield
