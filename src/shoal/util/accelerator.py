"""Streams, events and synchronization of a device, by the device module of its type."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


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


def count() -> int:
    """Return the number of accelerators that torch sees on this machine."""
    return torch.accelerator.device_count() if current()[0] else 0


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


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


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
    """Wait until the device has finished all queued work; return at once on the CPU."""
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
