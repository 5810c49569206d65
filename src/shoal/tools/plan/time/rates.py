"""Seconds of work on one device: an additive roofline.

A matrix product takes 2MNK / (efficiency x peak) + bytes / (efficiency x bandwidth) + launch, and an
element-wise operation the last two. Layers whose operations are shorter than the host needs to start
them wait for the host: (device^4 + host^4)^(1/4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.work.planned_step import PlannedStep
from shoal.tools.plan.work.segments import Quantity, Work


@dataclass(frozen=True)
class ComputeSeconds:
    """Seconds on the device by kind, and those that it waits for the host."""

    products: Quantity = 0.0
    convolutions: Quantity = 0.0
    attention: Quantity = 0.0
    memory: Quantity = 0.0
    launch: Quantity = 0.0
    host: Quantity = 0.0

    def __add__(self, other: ComputeSeconds) -> ComputeSeconds:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ComputeSeconds(*(ours + theirs for ours, theirs in pairs))

    def __mul__(self, factor: Quantity) -> ComputeSeconds:
        return ComputeSeconds(*(factor * each for each in vars(self).values()))

    @property
    def total(self) -> Quantity:
        """All seconds."""
        return sum(vars(self).values())


def compute_seconds(work: Work, plan: PlannedStep, machine: Machine) -> ComputeSeconds:
    """Return the seconds of some work on one device."""
    rates, peak = machine.efficiency, peak_rate(plan, machine)
    products = work.products / (rates.product * peak)
    convolutions = work.convolutions / (rates.convolution * peak)
    attention = work.attention / (rates.attention * peak)
    memory = (work.product_bytes + work.traffic) / (rates.memory * machine.memory_bandwidth)
    host = work.operations * rates.host
    if machine.is_cpu:  # the host computes
        return ComputeSeconds(products, convolutions, attention, memory, 0.0, host)
    launch = work.operations * rates.launch
    device = products + convolutions + attention + memory + launch
    waited = (device**4 + host**4) ** 0.25 - device
    return ComputeSeconds(products, convolutions, attention, memory, launch, waited)


def peak_rate(plan: PlannedStep, machine: Machine) -> Quantity:
    """Return the FLOP/s of the data sheet in the precision of a plan."""
    return np.where(plan.numbers.activation == 2, machine.half, machine.tf32 or machine.fp32)
