"""Measure the efficiencies of a machine with the operations of one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from shoal._torch.dispatch import UncompiledMode, is_wrapper
from shoal.distributed.init import init
from shoal.tools.bench.measurement import target_errors
from shoal.tools.bench.scaling.models import Workload, one_batch
from shoal.tools.plan.machine.machines import RANGES, Machine, limited_efficiency
from shoal.tools.plan.trace import eager_model
from shoal.tools.plan.work.planned_step import Work
from shoal.tools.plan.work.traced_work import is_counted, operation_work
from shoal.util import accelerator
from shoal.util.clock import CLOCK, Clock
from shoal.util.errors import LaunchError

_PASSES, _SECONDS = 3, 15.0
"""The smallest number of passes, and the seconds that all passes take together."""


class OperationTimes(UncompiledMode):
    """Dispatch mode that keeps the work and the seconds of each operation of the fastest pass.

    A pass begins when the mode is entered and ends when it is left.
    """

    def __init__(self, device: torch.device, clock: Clock = CLOCK) -> None:
        super().__init__()
        self._clock = clock
        self.fastest: list[tuple[Work, float]] = []
        self._running: list[tuple[Work, float]] = []
        self._device = device

    def __enter__(self) -> Self:
        """Begin a pass."""
        self._running = []
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Keep the pass if it is complete and the fastest so far."""
        super().__exit__(*raised)
        if raised[0] is not None:
            return
        if not self.fastest or _total(self._running) < _total(self.fastest):
            self.fastest = self._running

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operation and measure it."""
        if any(map(is_wrapper, types)):
            return NotImplemented
        named = named or {}
        accelerator.synchronize(self._device)
        begun = self._clock.now()
        result = function(*arguments, **named)
        accelerator.synchronize(self._device)
        seconds = self._clock.now() - begun
        if is_counted(function):
            self._running.append((operation_work(function, arguments, named, result), seconds))
        return result

    def kinds(self) -> Mapping[str, tuple[Work, float]]:
        """Return the total work and the total seconds of each kind of operation in the fastest pass.

        Each operation counts without the seconds of the shortest one, which computes almost nothing.
        """
        start = min((seconds for _, seconds in self.fastest), default=0.0)
        found: dict[str, tuple[Work, float]] = {}
        for work, seconds in self.fastest:
            kind = _kind(work)
            done, took = found.get(kind, (Work(), 0.0))
            found[kind] = done + work, took + seconds - start
        return found


def time_operations(given: str, build: Callable[[], Workload], samples: int) -> OperationTimes:
    """Run forward and backward passes of a model on one batch, and return the times of its operations.

    `given` identifies the model in errors, `samples` is the size of the batch. On a CPU the model
    computes in float32, on accelerators with bfloat16 autocast.

    Raises ShoalError if the model fails.
    """
    with init(alone=True) as world:
        device = world.device
        times = OperationTimes(device)
        enabled = accelerator.is_accelerator(device)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=enabled)
        with target_errors(given):
            model, loss = one_batch(build(), samples, world)
            eager_model(model)
            begun, passes = CLOCK.now(), 0
            while passes < _PASSES or CLOCK.now() - begun < _SECONDS:
                model.zero_grad()
                with times, autocast:
                    value = loss(model)
                    if not value.requires_grad:
                        raise LaunchError(
                            given=given,
                            found="its loss has no gradient: no parameter requires one, or gradients "
                            "are turned off",
                            fix="return a model that can be trained",
                        )
                    value.backward()
                passes += 1
    return times


def fit_operations(machine: Machine, kinds: Mapping[str, tuple[Work, float]]) -> Machine:
    """Return the machine with the efficiencies at which operations take the measured seconds.

    `kinds` maps the name of an efficiency to work and seconds. The other efficiencies do not change.

    Example:
        >>> from shoal.tools.plan.machine.machines import find_machine
        >>> machine = find_machine("a100-80")
        >>> seconds = 2e12 / machine.half  # of products that reach half of the peak
        >>> fit_operations(machine, {"product": (Work(products=1e12), seconds)}).efficiency.product
        0.5
    """
    rest, found = dict(kinds), {}
    moved, seconds = rest.pop("memory", (Work(), 0.0))
    if seconds > 0:
        rate = moved.traffic / seconds
        found["memory"] = limited_efficiency("memory", rate / machine.memory_bandwidth)
    bandwidth = machine.memory_bandwidth * found.get("memory", machine.efficiency.memory)
    peak = machine.fp32 if machine.is_cpu else machine.half
    for kind, (work, seconds) in rest.items():
        flops = work.products + work.attention + work.convolutions
        left = seconds - (work.product_bytes + work.traffic) / bandwidth
        found[kind] = limited_efficiency(kind, flops / (peak * left) if left > 0 else math.inf)
    return replace(machine, efficiency=replace(machine.efficiency, **found))


def unlikely_efficiencies(machine: Machine, kinds: Iterable[str]) -> list[str]:
    """Return the kinds whose efficiency is at an end of its range, so that it was limited."""
    return [kind for kind in kinds if getattr(machine.efficiency, kind) in RANGES[kind]]


def _total(operations: Iterable[tuple[Work, float]]) -> float:
    return sum(seconds for _, seconds in operations)


def _kind(work: Work) -> str:
    """Return the efficiency on which the time of an operation depends most."""
    if work.convolutions:
        return "convolution"
    if work.attention:
        return "attention"
    return "product" if work.products else "memory"
