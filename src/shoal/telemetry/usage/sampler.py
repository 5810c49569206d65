"""The usage of a rank's process and devices, sampled by a thread in a limited fraction of the time."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
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


_KEPT = 1000
"""Maximum number of notes that are kept; the oldest are dropped."""
_JOIN_SECONDS = 5.0

Note = tuple[str, dict[str, Any]]
"""The kind of an event and its fields."""

Run = Callable[[], Note | None] | Callable[[], None]


@dataclass(kw_only=True)
class PeriodicTask:
    """A job that runs every `seconds`, or less often if it would take more than `share` of the time.

    `run` returns the resulting event, if any. With `jitter` the times are random, so that they do not
    correlate with steps. A job that `ends` runs once more at the end.
    """

    name: str
    seconds: float
    run: Run
    share: float = 0.0005
    jitter: bool = False
    ends: bool = False
    due: float = field(default=0.0, init=False)


class UsageSampler:
    """A daemon thread that runs jobs until `stop`, and keeps their events until `taken` returns them.

    If a job fails, `say` reports it once, and the job is not run again.
    """

    def __init__(
        self, jobs: Sequence[PeriodicTask], *, step: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._jobs = list(jobs)
        self._step = step
        self._say = say
        self._notes: deque[Note] = deque(maxlen=_KEPT)
        # A separate generator: the global ones belong to training.
        self._random = Random(os.getpid())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal sampler", daemon=True)
        now = CLOCK.now()
        for job in self._jobs:
            job.due = now + self._period(job)
        self._thread.start()

    def taken(self) -> Iterator[Note]:
        """Yield the events since the last call."""
        while self._notes:
            yield self._notes.popleft()

    def let_go(self) -> None:
        """Let the thread end by itself."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread, and run the jobs once more that run at the end."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if not self._thread.is_alive():  # in a process that was forked from this one
            return
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            for job in [job for job in self._jobs if job.ends]:
                self._do(job)

    def _run(self) -> None:
        while self._jobs:
            job = min(self._jobs, key=lambda job: job.due)
            if CLOCK.wait(self._stopped, max(0.0, job.due - CLOCK.now())):
                return
            begun = CLOCK.thread_seconds()
            self._do(job)
            # This time matters in a process with few cores, or one that hardly computes.
            spent = CLOCK.thread_seconds() - begun
            job.due = CLOCK.now() + max(self._period(job), spent / job.share)

    def _period(self, job: PeriodicTask) -> float:
        return job.seconds * (self._random.uniform(0.5, 1.5) if job.jitter else 1.0)

    def _do(self, job: PeriodicTask) -> None:
        try:
            note = job.run()
        except Exception as error:  # a failed sample must not fail the run
            self._jobs.remove(job)
            self._say(f"shoal: {job.name} is no longer recorded: {type(error).__name__}: {error}")
            return
        if note is not None:
            kind, fields = note
            self._notes.append((kind, {"t": round(CLOCK.wall(), 6), "step": self._step(), **fields}))


def noting(kind: str, fields: Callable[[], Mapping[str, Any]]) -> Callable[[], Note]:
    """Return a job that records the fields as an event of one kind."""
    return lambda: (kind, dict(fields()))
