"""Predicted and measured step times of convolutional networks on this machine.

    python benchmarks/plan_machine.py
    python benchmarks/plan_machine.py --operations      # also by kind of operation
    python benchmarks/plan_machine.py --steps 3 --edge 32 --batch 2      # a short try

It measures the machine as `shoal bench machine` does, traces one step of each network, and compares the
predicted time with the median of measured steps. The machine must be idle.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import shoal
from harness import finish, parse, show, time_steps
from harness import machine as here
from helpers.planned_models import UNet, classes, values
from loops import through_shoal
from resnet import network
from shoal._torch.dispatch import TorchDispatchMode
from shoal.distributed.layout import Layout
from shoal.tools.bench.scaling.models import Workload
from shoal.tools.plan.machine.machines import Machine
from shoal.tools.plan.machine.measure import LinkRates, machine_toml, measure_machine
from shoal.tools.plan.time.rates import compute_seconds
from shoal.tools.plan.trace import trace_step
from shoal.tools.plan.work.planned_step import PlannedStep, Work
from shoal.tools.plan.work.traced_work import operation_work


def resnet50() -> nn.Module:
    """Return ResNet-50 (He et al. 2016)."""
    return network(50, 64)


class Operations(TorchDispatchMode):
    """Dispatch mode that sums the measured seconds and the work of each kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, Work] = defaultdict(Work)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        begun = time.perf_counter()
        result = function(*arguments, **(named or {}))
        taken = time.perf_counter() - begun
        if not function.is_view:
            self.seconds[str(function)] += taken
            self.work[str(function)] += operation_work(function, arguments, named or {}, result)
        return result


def print_operations(built: Workload, batch: int, plan: PlannedStep, machine: Machine) -> None:
    """Print the kinds of operations that take most of a step, measured and predicted."""
    with shoal.init(device="cpu") as world:
        model = shoal.parallelize(built.model, world)
        step = shoal.Step(model, torch.optim.AdamW(model.parameters()), built.task)
        first, *_, last = itertools.islice(
            shoal.Loader(built.dataset, world, batch_size=batch).epochs(3), 3
        )
        step(first)
        with Operations() as found:
            step(last)
    for name in sorted(found.seconds, key=found.seconds.__getitem__, reverse=True)[:12]:
        predicted = compute_seconds(found.work[name], plan, machine).total
        print(f"  {name:45}measured {found.seconds[name]:.3f} s, predicted {predicted:.3f} s")


def workload(make: Callable[[], nn.Module], *, edge: int, batch: int, image: bool) -> Workload:
    """Return a network with images of `edge` pixels, which it classifies or reproduces."""
    pixels = torch.randn(batch, 3, edge, edge)
    targets = pixels.clone() if image else torch.arange(batch) % 10
    return Workload(make, shoal.Task(values if image else classes), (pixels, targets))


def measured_seconds(built: Workload, batch: int, steps: int) -> float:
    """Return the median of the seconds of steps, after two that warm up."""
    with shoal.init(device="cpu") as world:
        loop = through_shoal(
            world, built.model, built.dataset, batch, optimizer=torch.optim.AdamW, task=built.task
        )
        times = time_steps(world, {"": loop.__next__}, rounds=steps, steps=1, warm_up=2)
    return statistics.median(times[""])


def main() -> None:
    given = parse(__doc__, batch=8, edge=128, steps=20, operations=False)
    machine = measure_machine("here", LinkRates(link=1e9, network=1e9), 1)
    print(machine_toml(machine))
    plan = PlannedStep(
        layout=Layout(), global_batch=given.batch, micro_batch=given.batch, precision="fp32"
    )
    rows = []
    for name, make, image in (("ResNet-50", resnet50, False), ("U-Net", UNet, True)):
        build = partial(workload, make, edge=given.edge, batch=given.batch, image=image)
        predicted = compute_seconds(trace_step(build, plan).work, plan, machine)
        measured = measured_seconds(build(), given.batch, given.steps)
        rows.append(
            {
                "network": name,
                "measured, s": measured,
                "predicted, s": predicted.total,
                "error": f"{predicted.total / measured - 1:+.1%}",
                "convolutions": predicted.convolutions,
                "memory": predicted.memory,
                "host": predicted.host,
            }
        )
        if given.operations:
            print_operations(build(), given.batch, plan, machine)
    show(f"{given.batch} images of {given.edge} px, {here()}", rows)
    finish(given, {"plan_machine": rows})


if __name__ == "__main__":
    main()
