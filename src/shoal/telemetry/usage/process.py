"""Memory, cores and power of this process and its device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil
import torch

from shoal.util import accelerator
from shoal.util.clock import CLOCK


class Usage:
    """The resources that this process uses, as the fields of an event; unknown ones are left out.

    Power, energy and utilization are the GPU's, from NVML (`pip install '.[gpu]'`). They include
    all processes on the GPU, since the start of this one.
    """

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._device = device
        self._meter = GpuMeter.of(device)
        self._looked, self._busy = CLOCK.now(), self._cpu_seconds()

    def fields(self) -> dict[str, Any]:
        """Return bytes, watts, joules; `cpu` is the number of busy cores since the last call."""
        now, busy = CLOCK.now(), self._cpu_seconds()
        fields: dict[str, Any] = {
            "rss": self._process.memory_info().rss,
            "cpu": (busy - self._busy) / max(now - self._looked, 1e-9),
        }
        self._looked, self._busy = now, busy
        fields |= accelerator.memory(self._device)
        if self._meter is not None:
            fields |= self._meter.fields()
        return fields

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class GpuMeter:
    """NVML's values for a GPU; a GPU may lack some of them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._began = self._ask("nvmlDeviceGetTotalEnergyConsumption")

    @classmethod
    def of(cls, device: torch.device) -> GpuMeter | None:
        """Return the meter of a GPU; None on the CPU, and if NVML or the GPU in it can't be found."""
        if device.type != "cuda":
            return None
        with suppress(Exception):  # from the import, from NVML's many errors, or for an AMD GPU
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            with suppress(pynvml.NVMLError):
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode()))
        return None

    def fields(self) -> dict[str, Any]:
        """Return watts, joules since the start of this, and the GPU's utilization between 0 and 1."""
        fields: dict[str, Any] = {}
        power = self._ask("nvmlDeviceGetPowerUsage")
        if power is not None:
            fields["power"] = power / 1e3
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        if energy is not None and self._began is not None:
            fields["energy"] = (energy - self._began) / 1e3
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        if rates is not None:
            fields["utilization"] = rates.gpu / 100
        return fields

    def _ask(self, name: str) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle)
        except self._nvml.NVMLError:
            return None
